"""Start a Ray cluster of three nodes until stdin ends: start.py FOLDER PORT ARGUMENTS (JSON)."""

import json
import sys
import threading

import ray
from ray import serve
from ray.cluster_utils import Cluster

from edgeinfer.cluster.app import application

folder, port = sys.argv[1:3]
arguments = json.loads(sys.argv[3])
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
)
for _ in range(2):
    cluster.add_node(num_cpus=3)
ray.init(address=cluster.address, log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(application(arguments))
print("metrics", *(node["MetricsExportPort"] for node in ray.nodes()))
print("ready", flush=True)
stdin_reader = threading.Thread(target=sys.stdin.read)
stdin_reader.start()
while stdin_reader.is_alive():
    for node in cluster.list_all_nodes():  # reap zombies: Ray takes them for running processes
        for process in (
            process_info.process for group in node.all_processes.values() for process_info in group
        ):
            process.poll()
    stdin_reader.join(0.2)
serve.shutdown()
ray.shutdown()
cluster.shutdown()
