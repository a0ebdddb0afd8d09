"""The Ray Serve application: ingresses, engine replicas, metrics."""
