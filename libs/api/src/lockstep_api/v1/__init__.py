"""Generated from protos/lockstep/v1 by `make proto`. Do not edit."""
