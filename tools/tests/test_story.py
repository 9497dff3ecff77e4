"""The demo's comparison: it passes only when the client lost nothing and both kills hit."""

import dataclasses
import io

import pytest
from lockstep_tools.demo.story import Narrator, Story, show_comparison
from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, StreamRequest
from rich.console import Console

TOKENS = 60


def stream() -> History:
    request = StreamRequest("/completions", {"max_tokens": TOKENS, "stream_options": {"include_usage": True}})
    pieces = [Piece(number / 100, f"c:{number}", 0, f" {number}", tokens=1) for number in range(1, TOKENS + 1)]
    pieces[-1] = dataclasses.replace(pieces[-1], finish="length")
    end = [Piece(1.0, usage={"completion_tokens": TOKENS}), Piece(1.0, done=True)]
    return History(request, ended_s=1.0, pieces=pieces + end)


def story_of(history: History) -> Story:
    story = Story(History(history.request), failovers=2)
    for number, piece in enumerate(history.pieces):
        if number in (10, 40):
            story.add_kill(f"process {number}")
        story.history.pieces.append(piece)
    story.history.ended_s = history.ended_s
    return story


def judged(undisturbed: History, story: Story) -> tuple[bool, str]:
    out = io.StringIO()
    return show_comparison(undisturbed, story, Console(file=out, width=120)), out.getvalue()


def test_equal_streams_and_two_kills_that_hit_pass() -> None:
    well, shown = judged(stream(), story_of(stream()))
    assert well
    assert "✗" not in shown
    assert "same text, same tokens" in shown


def other_text(story: Story) -> None:
    story.history.pieces[20] = dataclasses.replace(story.history.pieces[20], text=" other")


def lost_token(story: Story) -> None:
    del story.history.pieces[20]


def doubled_token(story: Story) -> None:
    story.history.pieces.insert(20, story.history.pieces[20])


def wrong_usage(story: Story) -> None:
    story.history.pieces[-2] = dataclasses.replace(story.history.pieces[-2], usage={"completion_tokens": TOKENS - 1})


def ended_early(story: Story) -> None:
    del story.history.pieces[50:-2]


def failed(story: Story) -> None:
    story.history.error = "the worker is lost"


def one_kill_only(story: Story) -> None:
    del story.kills[1]


def kill_that_missed(story: Story) -> None:
    story.failovers = 1


@pytest.mark.parametrize(
    "damage",
    [other_text, lost_token, doubled_token, wrong_usage, ended_early, failed, one_kill_only, kill_that_missed],
)
def test_anything_less_fails(damage) -> None:
    story = story_of(stream())
    damage(story)
    well, shown = judged(stream(), story)
    assert not well
    assert "✗" in shown
    assert "The demo failed." in shown


def test_an_undisturbed_run_that_was_cut_short_fails() -> None:
    undisturbed, story = stream(), story_of(stream())
    for history in (undisturbed, story.history):
        del history.pieces[50:-2]
    assert not judged(undisturbed, story)[0]


def test_the_gap_is_the_longest_silence_soon_after_the_kill() -> None:
    history = stream()
    history.pieces[10:] = [dataclasses.replace(piece, at_s=piece.at_s + 0.25) for piece in history.pieces[10:]]
    history.pieces[55:] = [dataclasses.replace(piece, at_s=piece.at_s + 9.0) for piece in history.pieces[55:]]
    story = story_of(history)
    assert story.gap_ms(story.kills[0]) == pytest.approx(260)
    assert story.gap_ms(story.kills[1]) == pytest.approx(10)


def test_the_narrator_prints_the_text_and_remarks_on_lines_of_their_own() -> None:
    out = io.StringIO()
    story = Story(History(StreamRequest("/completions", {})))
    narrator = Narrator(story, Console(file=out, width=120))
    narrator.begin("Once")
    for piece in stream().pieces[:30]:
        story.history.pieces.append(piece)
        narrator.hear(piece)
        if piece.text == " 3":
            narrator.remark(f"✂ killed {story.add_kill('w0').victim}", "red")
    narrator.end_line()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["Once 1 2 3", "  ✂ killed w0"]
    assert lines[2] == " 4 5 6 7 8 9 10 11 12 13 14 15"
    assert lines[3] == "  ↻ went on; the client saw a gap of 10 ms"
    assert lines[4].startswith(" 16 17")
    assert len(lines) == 5


class Screen(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "shown"),
    [(Screen(), "a\\x1b[2Jb\tc\nd\u200de\\u202e"), (io.StringIO(), "a\x1b[2Jb\tc\nd\u200de\u202e")],
)
def test_a_terminal_does_not_act_on_the_text(out: io.StringIO, shown: str) -> None:
    narrator = Narrator(Story(stream()), Console(file=out, width=120))
    narrator.hear(Piece(0.0, text="a\x1b[2Jb\tc\nd\u200de\u202e"))
    assert out.getvalue() == shown
