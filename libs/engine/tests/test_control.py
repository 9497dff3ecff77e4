"""Control messages arrive as they were sent, in one packet, and cannot be taken for doorbells."""

import os
import socket
from dataclasses import replace

import pytest
from handmade import write_model
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import EngineConfig
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    AllocateBlocks,
    Fork,
    KillAll,
    Loaded,
    Loading,
    RankDescriptors,
    RankSpec,
    Ready,
    StartFailed,
    decode_doorbell,
    decode_rank_message,
    decode_zygote_message,
    encode_control,
    encode_doorbell,
    receive_order,
    send_fork,
)
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.model_config import inspect_model
from specs import model_info, rank_spec


def test_a_rank_is_told_all_that_the_driver_knows_of_settings_and_model(tmp_path):
    config = EngineConfig(
        model=str(write_model(tmp_path / "m")),
        tp=2,
        max_context=64,
        kv_compression="per_layer",
        kv_compressed_layers=(0, 1),
        label="w7",
    )
    spec = RankSpec(rank=1, epoch=3, config=config, model=inspect_model(config), threads=2)
    message = decode_zygote_message(encode_control(Fork(spec, shared_collectives=True)))
    assert message == Fork(spec, shared_collectives=True)
    assert message.spec.model.context_length == 64
    assert message.spec.config.hot_window == config.hot_window


def test_a_checkpoint_of_a_thousand_files_fits_a_message():
    files = tuple(f"model-{number:05d}-of-01000.safetensors" for number in range(1000))
    spec = RankSpec(0, 0, rank_spec().config, replace(model_info(), weight_files=files), 1)
    assert len(encode_control(Fork(spec, shared_collectives=False))) < MAX_CONTROL_BYTES


@pytest.mark.parametrize(
    "message",
    [
        Loading(1, 2),
        Loaded(PoolSizes(3, 4), {"join": 0.5}),
        AllocateBlocks(PoolSizes(0)),
        Ready(True, "cpu", "float32"),
        StartFailed("", permanent=False),
    ],
    ids=lambda each: type(each).__name__,
)
def test_messages_arrive_as_they_were_sent(message):
    packet = encode_control(message)
    assert decode_rank_message(packet) == message
    assert decode_doorbell(packet) is None


@pytest.mark.parametrize("step", [0, 1, 2**63])
def test_a_doorbell_names_its_step(step):
    assert decode_doorbell(encode_doorbell(step)) == step


def test_a_ranks_descriptors_arrive_under_their_names():
    driver, zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = RankDescriptors(**{name: Mailbox.create(0, name) for name in RankDescriptors._fields})
    fork = Fork(rank_spec(), shared_collectives=True)
    with driver, zygote:
        send_fork(driver, fork, sent)
        driver.send(encode_control(KillAll()))
        message, received = receive_order(zygote)
        assert message == fork
        for name in RankDescriptors._fields:
            assert os.readlink(f"/proc/self/fd/{getattr(received, name)}").startswith(f"/memfd:lockstep-{name}")
        assert receive_order(zygote) == KillAll()
        driver.close()
        assert receive_order(zygote) is None
    sent.close()
    received.close()


def test_the_shortest_message_is_no_doorbell():
    assert decode_doorbell(encode_control(KillAll())) is None
