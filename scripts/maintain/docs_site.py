"""The documentation's site, as far as Markdown does not say it; mkdocs calls these functions (mkdocs.yml).

- The table of contents is that of docs/README.md.
- Links to files beside docs/ lead to pages that show them, and links to folders to what is in them.
- A page tells Python's public names, from their docstrings.
"""
import os
import re
from pathlib import Path
from typing import Any, Dict, List

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTENTS = "README.md"
API = "reference/api.md"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)"
                  r"|^(```|~~~).*?^\4\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)  # or code, which holds no links
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}

NAMES: Dict[str, List[str]] = {
    "Stores": ["kvstore.create", "kvstore.register", "kvstore.register_method", "kvstore.fronts.gluon.store.Store",
               "kvstore.fronts.gluon.legacy.LegacyStore"],
    "Scripts and runs": ["odsgd.checkpoint", "odsgd.callbacks", "odsgd.board", "odsgd.launch.function"],
    "PyTorch": ["kvstore.fronts.torch.store.create", "kvstore.fronts.torch.optimizer.Optimizer",
                "kvstore.fronts.torch.store.TorchStore"],
    "A method of your own": ["kvstore.methods.contract", "kvstore.options"],
    "Errors": ["kvstore.errors"],
}


def on_config(config: Any) -> Any:
    """The table of contents, headings and links of docs/README.md; links to edit pages, where a repository is known."""
    config.edit_uri = "edit/main/docs/" if config.repo_url else None
    parts = re.split(r"^## (.+)$", (DOCS / CONTENTS).read_text(encoding="utf-8"), flags=re.MULTILINE)
    config.nav = [{"Overview": CONTENTS}]
    for heading, text in zip(parts[1::2], parts[2::2]):
        pages = [{title.replace("`", ""): _inside((DOCS / target).resolve())}
                 for title, target, *_ in LINK.findall(text) if target.endswith(".md")]
        config.nav.append({heading: [*pages, *([{"Python": API}] if heading == "Reference" else [])]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages for what is linked, and lies beside docs/ or is a folder; and the names of Python."""
    files.append(File.generated(config, API, content=_api()))
    for page in list(files.documentation_pages()):
        for target in _targets(page.abs_src_path):
            if target.exists() and files.get_file_from_path(_inside(target)) is None:
                files.append(File.generated(config, _inside(target), content=_shown(target),
                                            inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links there."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    folder = Path(source).parent

    def led(found: "re.Match[str]") -> str:
        title, target, anchor, _ = found.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        there = os.path.relpath(_inside((folder / target).resolve()), os.path.dirname(page.file.src_uri) or ".")
        return f"[{title}]({there}{anchor or ''})"

    return LINK.sub(led, markdown)


def _targets(source: Any) -> List[Path]:
    """What a page links to, that has no page of its own in docs/."""
    if source is None:
        return []
    path = Path(source)
    found = [link[2] for link in LINK.finditer(path.read_text(encoding="utf-8"))]
    targets = [(path.parent / target).resolve() for target in found if target and "://" not in target]
    return [target for target in dict.fromkeys(targets) if target.is_dir() or DOCS not in target.parents]


def _inside(path: Path) -> str:
    """The page that shows a file, below docs/."""
    if path.is_dir():
        return _inside(path / "index.md")
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"files/{name}" if path.suffix == ".md" else f"files/{name}.md"


def _shown(path: Path) -> str:
    """The Markdown that shows a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return "\n".join([f"# {name}", "", *(f"- `{one.name}`" for one in sorted(path.iterdir()))])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return LINK.sub(_led_from_root, text)
    return f"# {name}\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~\n"


def _led_from_root(found: "re.Match[str]") -> str:
    """A link of a file at the top of the repository, on its page in files/; what has no page stays as text."""
    title, target, anchor, _ = found.groups()
    if not target or "://" in target:
        return found[0]
    path = ROOT / target
    if DOCS in path.parents and path.is_file():
        return f"[{title}](../{_inside(path)}{anchor or ''})"
    return str(title)


def _api() -> str:
    lines = ["# Python", "", "What a script may call, from the docstrings."]
    for heading, names in NAMES.items():
        lines += ["", f"## {heading}", *(f"\n::: {name}" for name in names)]
    return "\n".join(lines)
