"""Errors that are kept, and raised to several."""

import contextlib

from lockstep_common.errors import ErrorCode, LockstepError


class Named(LockstepError):
    """An error of a subclass with a signature and an attribute of its own."""

    def __init__(self, name):
        super().__init__(ErrorCode.OVERLOADED, f"{name} is full", field=name, retry_after_s=2.5)
        self.name = name


def raised(error):
    with contextlib.suppress(LockstepError):
        try:
            raise ValueError("an earlier problem")
        except ValueError as cause:
            raise error from cause
    return error


def test_a_copy_has_all_of_an_error_but_where_it_was_raised():
    for error in (LockstepError(ErrorCode.WORKER_LOST, "gone", field="model", retry_after_s=5), Named("queue")):
        assert raised(error).__traceback__ is not None
        copy = error.copied()
        assert (type(copy), vars(copy), copy.args, str(copy)) == (type(error), vars(error), error.args, str(error))
        assert (copy.__traceback__, copy.__cause__, copy.__context__) == (None, None, None)
        assert copy.openai_body() == error.openai_body()


def test_copies_gain_nothing_from_each_other():
    error = LockstepError(ErrorCode.DRAINING, "going down")
    copies = [raised(error.copied()) for _ in range(3)]
    assert error.__traceback__ is None
    assert len({id(each) for each in copies}) == 3
    copies[0].message = "another"
    assert error.message == "going down"
