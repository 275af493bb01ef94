"""``odsgd reproduce``: the tables and figures of the papers, from training runs of ours, beside the papers' numbers.

    papers/PAPER.yaml      each table and figure: the paper's numbers, cells, pictures and claims       `declarations`
      │  one training run per cell and seed, `odsgd train` in a folder of its own, resumable            `run`
      ▼
    docs/results/data/…    a line of JSON for each run that is over: configuration, versions, curve      `results`
      │  numbers of a run by name; a claim's difference, its confidence interval, its ruling   `measures`, `claims`
      ▼
    docs/results/*.md      pages and pictures, from declarations and files alone      `front`, `pages`, `pictures`
"""
