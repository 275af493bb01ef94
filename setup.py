"""Packaging of odsgd: two packages, `kvstore` (stores, servers, workers) and `odsgd` (the training job on them).

PyTorch and MXNet come by extra. pip must see odsgd and MXNet in one command: asked later for one of them alone it would
bring NumPy 2, which MXNet 1.9.1 cannot use.
"""
import os
import runpy
from pathlib import Path
from typing import List

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ITS = runpy.run_path(str(HERE / "kvstore/_version.py"))

REQUIRES = [
    "numpy>=1.19",
    "PyYAML>=5.4",
    "tqdm>=4.60",
    "greenlet>=1.1,<4",  # the buckets of a worker on a virtual cluster
    "cloudpickle>=2.0",  # functions of a script on their way to the workers of odsgd.launch
]

# Gluon, `odsgd train` and what it trains on. Upper bounds stand only where a newer release is known to break, or to
# make pip download release after release before it finds one for NumPy 1 (each OpenCV is 60 MB).
WITH_MXNET = [
    "numpy<2",  # MXNet 1.9.1 is compiled for NumPy 1
    "opencv-python>=4.5,<4.12",  # asked for by GluonCV; 4.12 is the first for NumPy 2 alone
    "pandas>=1.3,<3.1",  # asked for by GluonCV; 3.1 is the first for NumPy 2 alone
    "gluoncv==0.10.5.post0",  # the last release for MXNet 1
    "scikit-learn>=1.0",  # its handwritten digits
    "scipy>=1.5",  # Student's t
    "setuptools>=65",  # MXNet and GluonCV import distutils, gone from Python 3.12
]
UP_TO = "; python_version < '3.13'"  # NumPy 1 has no wheels for later ones

# Every CUDA for which MXNet was published, newest first.
MXNET = {
    "cpu": "mxnet==1.9.1",
    "cu112": "mxnet-cu112==1.9.1",
    "cu110": "mxnet-cu110==1.9.1",
    "cu102": "mxnet-cu102==1.9.1",
    "cu101": "mxnet-cu101==1.9.1",
    "cu100": "mxnet-cu100==1.9.0",
}

MPI = ["mpi4py>=4.1", "mpich>=5.0"]  # both the first that need no compiler: wheels, for every Python

PLOT = ["matplotlib>=3.3"]

# The first with Tensor.register_post_accumulate_grad_hook. Up to 2.2 it is compiled for NumPy 1, later for both.
TORCH = ["torch>=2.1", "numpy>=1.22"]

PYTEST = ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.79"]

BOARD = ["tensorboardX>=2.6.2,<3"]  # the first without an upper bound on protobuf; has releases for every Python here

# Of mkdocstrings and its parts the newest that each Python has; 0.26 is the last for 3.8.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.26"]

# A later ruff may know rules that this code has never met; the others' releases differ from Python to Python.
CHECK = ["ruff>=0.17,<0.18", "mypy>=1.11", "import-linter>=2.0", "types-PyYAML", "types-tqdm"]


def note_commit(folder: str) -> None:
    """Write into the packages in `folder` which commit they come from."""
    commit = ITS["commit"]()
    if commit:
        (Path(folder) / "kvstore" / ITS["BUILT_FROM"]).write_text(commit)


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            note_commit(self.build_lib)


class Source(sdist):
    def make_release_tree(self, base_dir: str, files: List[str]) -> None:
        super().make_release_tree(base_dir, files)
        note_commit(base_dir)


setup(
    name="odsgd",
    version=ITS["VERSION"],
    description="Data-parallel training that computes the next batch while gradients travel, for MXNet and PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    project_urls={name: os.environ[key] for name, key in (("Source", "REPO_URL"), ("Documentation", "SITE_URL"))
                  if os.environ.get(key)},
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["distributed training", "parameter server", "SGD", "MXNet", "PyTorch"],
    cmdclass={"build_py": Build, "sdist": Source},
    python_requires=">=3.8",
    packages=find_packages(include=["kvstore", "kvstore.*", "odsgd", "odsgd.*"]),
    package_data={"": ["py.typed"], "odsgd.lab.advise": ["measured.json"]},
    install_requires=REQUIRES,
    extras_require={
        **{name: [one + UP_TO for one in (requirement, *WITH_MXNET)] for name, requirement in MXNET.items()},
        "mpi": MPI,
        "plot": PLOT,
        "torch": TORCH,
        "trainers": ["accelerate", "transformers", "lightning"],  # tests of what trains by a store
        "board": BOARD,
        "pytest": PYTEST,
        "test": [*PYTEST, "scikit-learn>=1.0", *MPI, *PLOT, *BOARD],
        "check": [*CHECK, *DOCS],
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["odsgd = odsgd.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Operating System :: POSIX :: Linux",
        "Typing :: Typed",
        *("Programming Language :: Python :: 3." + str(minor) for minor in range(8, 14)),
    ],
)
