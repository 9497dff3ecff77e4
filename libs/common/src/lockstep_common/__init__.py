"""What all Lockstep services share: errors, settings, telemetry, process life. It knows no service and no engine."""
