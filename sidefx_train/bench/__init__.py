"""Step time of captured training steps against eager and ``torch.compile``.

``python -m sidefx_train.bench --suite core`` runs every workload (``workloads.py``) with every contender
(``contenders.py``), each in a fresh process (``worker.py``), several interleaved rounds (``rounds.py``), and prints
medians of the ratios of turns beside each other (``summary.py``, ``show.py``).
"""
