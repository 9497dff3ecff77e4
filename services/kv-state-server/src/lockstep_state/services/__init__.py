"""The gRPC services: they check what comes in, make keys of names and tenants, and call the backend."""
