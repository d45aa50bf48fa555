"""Measurements that `diloco bench` makes on the machine it runs on. Nothing here is imported by `import diloco`."""
