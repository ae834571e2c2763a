"""What the cluster's side of resile must reach, measured on a real cluster; run with `make bench-kube`."""
