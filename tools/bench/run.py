"""The engine and the service against peers, in one run, as ratios: `make bench`.

Every comparison alternates between the two sides and quotes medians, so that a noisy machine slows both alike. The same
weights, dtype (float32) and number of CPU threads everywhere; the engine runs in its default, deterministic mode.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from lockstep_engine import Engine, SamplingParams
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import record
from lockstep_tools.load.history import StreamRequest, violations
from lockstep_tools.serving.stack import Stack, StackSettings
from measure import ROOT, in_turn, machine
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

ROUNDS = 5
NEW_TOKENS = 128
SEED = 11

Row = dict[str, Any]


def compare(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of each, taken in turn after one warm-up."""
    medians = in_turn({"ours": ours, "theirs": theirs}, ROUNDS)
    return medians["ours"], medians["theirs"]


def row(name: str, tokens: int, ours_s: float, theirs_s: float, peer: str, goal: float) -> Row:
    """A line of the table: tokens a second on both sides, and their ratio against the goal."""
    return {
        "comparison": name,
        "ours_tokens_per_s": round(tokens / ours_s, 1),
        "peer": peer,
        "peer_tokens_per_s": round(tokens / theirs_s, 1),
        "ratio": round(theirs_s / ours_s, 2),
        "goal": goal,
    }


def greedy(tokens: int) -> SamplingParams:
    """Exactly `tokens` tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], tokens: int) -> None:
    """`transformers` generate over a batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )


def generate_continuously(model: PreTrainedModel, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """`transformers` continuous batching, each request with its own length."""
    config = GenerationConfig(max_new_tokens=max(lengths), do_sample=False, pad_token_id=0, eos_token_id=-1)
    with model.continuous_batching_context_manager(generation_config=config, warmup=False) as manager:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        done = 0
        while done < len(prompts):
            result = manager.get_result(timeout=60)
            done += result is not None and result.is_finished()


def bench_engine(engine: Engine, model: PreTrainedModel, vocabulary: int) -> list[Row]:
    """The engine alone against `transformers` in this process."""
    rng = random.Random(SEED)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(2, vocabulary) for _ in range(length)]

    one = prompt(32)
    rows = []
    ours, theirs = compare(
        lambda: engine.generate_ids([one], greedy(NEW_TOKENS)), lambda: generate(model, [one], NEW_TOKENS)
    )
    rows.append(row("batch 1", NEW_TOKENS, ours, theirs, "transformers generate", 1.5))
    mixed = [prompt(rng.randrange(8, 256)) for _ in range(16)]
    lengths = [rng.randrange(16, 192) for _ in range(16)]

    def ours_mixed() -> None:
        engine.generate_ids(mixed, [greedy(length) for length in lengths])

    ours, theirs = compare(ours_mixed, lambda: generate(model, mixed, max(lengths)))
    rows.append(row("16 mixed requests", sum(lengths), ours, theirs, "transformers static batching", 3.0))
    ours, theirs = compare(ours_mixed, lambda: generate_continuously(model, mixed, lengths))
    rows.append(row("16 mixed requests", sum(lengths), ours, theirs, "transformers continuous batching", 1.5))
    for size, goal in ((4, 3.0), (8, 4.0)):
        many = [prompt(32) for _ in range(size)]
        batch, single = compare(
            lambda many=many: engine.generate_ids(many, greedy(NEW_TOKENS)),
            lambda: engine.generate_ids([one], greedy(NEW_TOKENS)),
        )
        rows.append(row(f"batch {size}", NEW_TOKENS * size, batch, single * size, "our batch 1", goal))
    return rows


def bench_driver(engine: Engine, vocabulary: int) -> Row:
    """How long rank 0 waits for the driver in a step at batch 16."""
    rng = random.Random(SEED)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(32)] for _ in range(16)]
    engine.generate_ids(prompts, greedy(NEW_TOKENS))
    status = engine.core.status()
    return {
        "driver_us": round(status.driver_us, 1),
        "step_us": round(status.step_us, 1),
        "share": round(status.driver_us / status.step_us, 3),
    }


async def stream_times(client: httpx.AsyncClient, model: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first text of a stream, and from there to its end.

    Raises:
        SystemExit: the stream failed, or has not `NEW_TOKENS` tokens, so that its times are meaningless.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    history = await record(client, StreamRequest("/completions", body))
    found = violations(history)
    if not found and history.tokens != NEW_TOKENS:
        found = [f"{history.tokens} tokens, not {NEW_TOKENS}"]
    if found:
        raise SystemExit(f"a timed stream is wrong: {'; '.join(found)}")
    assert history.first_token_s is not None
    assert history.ended_s is not None
    return history.first_token_s, history.ended_s - history.started_s - history.first_token_s


def bench_service(engine: Engine, path: Path, threads: int, vocabulary: int) -> Row:
    """The same stream from the bare engine and through router and gRPC; fresh prompts, so that no prefix is cached."""
    rng = random.Random(SEED)
    bare: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    with Stack(StackSettings(model=str(path), threads=threads)) as stack, asyncio.Runner() as runner:
        stack.wait_ready()
        client = Endpoint(f"{stack.url}/v1").client()
        name = path.resolve().name
        for _ in range(2 * ROUNDS + 1):
            prompt = [rng.randrange(2, vocabulary) for _ in range(32)]
            began = time.perf_counter()
            pieces = engine.stream(prompt, greedy(NEW_TOKENS))
            next(pieces)
            first = time.perf_counter()
            for _ in pieces:
                pass
            bare.append((first - began, time.perf_counter() - first))
            served.append(runner.run(stream_times(client, name, prompt)))
        runner.run(client.aclose())
    ttft = [statistics.median(each[0] for each in side[1:]) * 1e3 for side in (bare, served)]
    step = [statistics.median(each[1] for each in side[1:]) * 1e3 / (NEW_TOKENS - 1) for side in (bare, served)]
    return {
        "first_token_ms": {
            "engine": round(ttft[0], 2),
            "service": round(ttft[1], 2),
            "added": round(ttft[1] - ttft[0], 2),
        },
        "per_token_ms": {
            "engine": round(step[0], 3),
            "service": round(step[1], 3),
            "added": round(step[1] - step[0], 3),
        },
    }


def main() -> None:
    """Run everything, print a table, and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models/reference")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    vocabulary = int(model.config.vocab_size)
    with Engine(arguments.model, threads=arguments.threads, prefix_cache=False) as engine:
        report = {
            "machine": machine(),
            "threads": arguments.threads,
            "model": arguments.model.name,
            "throughput": bench_engine(engine, model, vocabulary),
            "driver_at_batch_16": bench_driver(engine, vocabulary),
            "service_over_engine": bench_service(engine, arguments.model, arguments.threads, vocabulary),
        }
    for each in report["throughput"]:
        outcome = "reached" if each["ratio"] >= each["goal"] else "MISSED"
        print(
            f"{each['comparison']:18} {each['ours_tokens_per_s']:8.1f} tok/s   {each['ratio']:5.2f}x "
            f"{each['peer']} (goal {each['goal']}x: {outcome})"
        )
    print(f"driver at batch 16: {report['driver_at_batch_16']}")
    print(f"router and gRPC over the bare engine: {report['service_over_engine']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
