"""The gRPC face: `lockstep.v1.Inference`, with health and reflection. `server` has the server."""
