"""Log lines of Lockstep's services: where they come from, which are wanted, how they are shown."""
