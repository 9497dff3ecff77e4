"""The demonstration behind `lockstep demo`: a stream whose workers are killed, compared with an undisturbed one."""
