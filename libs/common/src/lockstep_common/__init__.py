"""Code that all Lockstep services share: errors, settings, telemetry, process life. It depends on no service."""
