"""What a rank takes from the driver instead of finding it out again."""

import logging
import multiprocessing
import socket
import time

import torch
from checkpoints import VOCABULARY, make
from in_process_rank import InProcessRank
from lockstep_engine import SamplingParams
from lockstep_engine.config import EngineConfig
from lockstep_engine.control import MAX_CONTROL_BYTES, SetLogLevel, StartFailed, decode_rank_message
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.model_config import inspect_model
from lockstep_engine.plan import message_sizes
from lockstep_engine.rank_main import run_rank
from specs import rank_spec

SETTINGS = {"device": "cpu", "max_seqs": 2, "max_batch_tokens": 64, "kv_memory_bytes": 2**22, "threads": 1}


def test_the_served_context_is_the_one_that_the_engine_is_set_to(tmp_path):
    """Phi-3 has one set of rotary frequencies for contexts of up to 64 positions, and another for longer ones."""
    path, reference = make("phi3-two-ropes", tmp_path)
    prompt = torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        short = reference.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)[0, 40:].tolist()
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with InProcessRank(path, max_context=64, **SETTINGS) as served:
        assert served.run((prompt[0].tolist(), params)) == [short]
    with InProcessRank(path, **SETTINGS) as served:
        assert served.run((prompt[0].tolist(), params)) != [short]


def test_a_rank_does_not_inspect_the_checkpoint_again(tmp_path):
    """The driver reads it once: hashing it takes minutes on network storage, for every rank and every start."""
    path, _ = make("llama-grouped-untied", tmp_path)
    info = inspect_model(EngineConfig(model=str(path), **SETTINGS))
    for name in ("generation_config.json", "tokenizer.json"):
        (path / name).write_text("not JSON")
    with InProcessRank(path, model=info, **SETTINGS) as served:
        assert served.run(([5, 6, 7], SamplingParams(max_tokens=2, temperature=0)))


def test_a_rank_that_loads_obeys_an_order_for_its_log(tmp_path):
    path, _ = make("llama-grouped-untied", tmp_path)
    logger = logging.getLogger("lockstep")
    before = logger.level
    try:
        with InProcessRank(path, orders=[SetLogLevel("error"), SetLogLevel("warning")], **SETTINGS) as served:
            assert logger.level == logging.WARNING
            assert served.run(([5, 6, 7], SamplingParams(max_tokens=2, temperature=0)))
    finally:
        logger.setLevel(before)


def test_a_rank_that_cannot_load_says_why():
    """Whatever the error is: a driver that reads only "died" would start it again and again without a reason."""

    def make(*_):
        raise KeyError("model.embed_tokens.weight")

    spec = rank_spec(tp=1)
    fd = Mailbox.create(Mailbox.segment_bytes(1, *message_sizes(spec)), "test")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    context = multiprocessing.get_context("fork")  # it changes its process: name, signals, log
    process = context.Process(target=run_rank, args=(spec, theirs, fd, -1, "", -1, make))
    with ours, theirs:
        process.start()
        failed = decode_rank_message(ours.recv(MAX_CONTROL_BYTES))
        process.join(60)
    assert failed == StartFailed("rank 0: KeyError: 'model.embed_tokens.weight'", permanent=False)


def test_a_rank_counts_the_time_of_its_forward_passes(tmp_path):
    path, _ = make("llama-grouped-untied", tmp_path)
    with InProcessRank(path, **SETTINGS) as served:
        began = time.perf_counter_ns()
        served.run(([5, 6, 7], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)))
        passed_us = (time.perf_counter_ns() - began) / 1000
        assert served.mailbox.steps.tolist() == [20]
        (times,) = served.mailbox.times()
        assert 0 < times.forward_s < times.busy_s < passed_us / 1e6
        assert times.collective_s == served.mailbox.device_bytes[0] == 0  # it is alone, and on the CPU
