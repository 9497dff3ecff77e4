"""What `make` runs on this repository: gRPC stubs, the chart's schema and values, `k8s/` manifests, container images.

Each module is a program of its own (`python -m lockstep_tools.repository.NAME`). Nothing else imports this package.
"""
