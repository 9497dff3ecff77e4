"""`python -m lockstep_router`."""

from lockstep_router.server import main

if __name__ == "__main__":
    main()
