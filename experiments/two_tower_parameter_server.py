"""The two towers on two workers that update embeddings on two parameter servers.

python -m ctl.launch --workers=2 --ps=2 -- --config=experiments/two_tower_parameter_server.py

Each embedding is split over both servers. A worker computes a complete global batch, reads its rows from
the servers, and sends sparse gradients. It takes 52 seconds of CPU time. Recall at 100 with the seed 0:
22.2 %. Updates are asynchronous, so that the same seed gives slightly different numbers.
"""

import two_tower


def get_config():
    config = two_tower.get_config()
    config.runtime.strategy = "parameter_server"
    config.runtime.cluster.shard_mib = 0.25
    return config
