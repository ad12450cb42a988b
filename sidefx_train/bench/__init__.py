"""Step time of captured training steps against eager and ``torch.compile``.

``python -m sidefx_train.bench --suite core`` runs every workload (``workloads.py``) with every contender
(``contenders.py``), each in a fresh process (``worker.py``), in several interleaved rounds (``rounds.py``), and prints
medians of the ratios of adjacent runs (``summary.py``, ``show.py``).

``--device cuda`` does the same on a GPU, with other workloads and contenders, and with figures of the device
(``device.py``).
"""
