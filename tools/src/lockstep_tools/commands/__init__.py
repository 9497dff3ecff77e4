"""One module for each `lockstep` subcommand: its options, its run, what it prints. `cli` imports only the chosen one.

Commands import the packages beside this one; nothing imports a command.
"""
