import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from forged_logs import assert_only_own_lines, say_forged_goodbye
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

SCRIPTED = (str(Path(__file__).parent / "scripted_process.py"),)
FAILING = (str(Path(__file__).parent / "failing_process.py"),)
REAL = ("-m", "lockstep_worker")


@pytest.fixture(autouse=True)
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for termination messages, as the kubelet gives one."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("LOCKSTEP_TERMINATION_LOG", str(path))
    return path


def start(program: tuple[str, ...], *flags: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LOCKSTEP_MANAGEMENT_PORT": "0"} | variables,
    )


def ended(process: subprocess.Popen[str], within_s: float = 60) -> tuple[int, str]:
    """The exit code and the output."""
    try:
        output, errors = process.communicate(timeout=within_s)
    finally:
        process.kill()
    return process.returncode, output + errors


@pytest.fixture
def checkpoint(model_dir: Path) -> Path:
    """What the real engine accepts before it starts its ranks."""
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (model_dir / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir


def await_socket(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def serve_one(path: str, max_tokens: int):
    """A Serve call on a worker process with one stream running."""
    frames = iter(
        [
            worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r")),
            worker_pb2.RouterFrame(
                submit=worker_pb2.Submit(
                    stream_id="s", attempt=1, prompt_ids=[1], sampling=inference_pb2.Sampling(max_tokens=max_tokens)
                )
            ),
        ]
    )

    def until_closed():
        yield from frames
        while True:
            time.sleep(0.05)
            if call.done():
                return

    channel = grpc.insecure_channel(f"unix:{path}")
    call = worker_pb2_grpc.WorkerStub(channel).Serve(until_closed())
    return channel, call


def read_until(call, kind: str) -> worker_pb2.WorkerFrame:
    return next(frame for frame in call if frame.WhichOneof("frame") == kind)


def await_ready(path: str) -> None:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        hello = worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="probe"))
        seen = threading.Event()

        def frames():
            yield hello
            seen.wait(60)

        for frame in worker_pb2_grpc.WorkerStub(channel).Serve(frames(), timeout=60, wait_for_ready=True):
            if frame.status.state == worker_pb2.WORKER_STATE_READY:
                seen.set()
                return


@pytest.mark.parametrize(("program", "says"), [(SCRIPTED, "tokenizer.json"), (REAL, "no such directory")])
def test_a_missing_model_ends_with_2_and_a_sentence(program, says):
    code, said = ended(start(program, "--model", "/no/such/model", "--listen", "127.0.0.1:0"))
    assert code == 2
    assert says in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["port", "socket", "management"])
def test_a_taken_address_ends_with_2_and_a_sentence(model_dir, socket_path, kind):
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(socket_path)
        unix.listen()
        number = str(port.getsockname()[1])
        flags = {
            "port": ["--listen", f"127.0.0.1:{number}"],
            "socket": ["--listen", f"unix:{socket_path}"],
            "management": ["--listen", "127.0.0.1:0", "--management-port", number],
        }[kind]
        code, said = ended(start(SCRIPTED, "--model", str(model_dir), *flags))
    assert code == 2
    assert re.fullmatch(r"cannot listen on .*\n", said)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "3"], "2 attention heads cannot be split"),
        (["--max-batch-tokens", "1"], "max_batch_tokens must be at least max_seqs"),
        (["--name", "tokenizerless"], "tokenizer.json is missing"),
        (["--name", "truncated"], "cut short"),
        (["--name", "broken tokenizer"], "tokenizer.json is no tokenizer"),
        (["--min-shm", "64Ti"], r"/dev/shm has"),
        (["--device", "cuda", "--tp", "2", "--min-shm", "64Ti"], "and 2 ranks need 6.711e+07 MiB"),
    ],
)
def test_what_the_engine_cannot_serve_ends_with_2_and_a_sentence(checkpoint, flags, says, last_words):
    if "tokenizerless" in flags:
        (checkpoint / "tokenizer.json").unlink()
    if "broken tokenizer" in flags:
        (checkpoint / "tokenizer.json").write_text('{"model": {}}')
    if "truncated" in flags:
        os.truncate(checkpoint / "model.safetensors", 70)
    code, said = ended(start(REAL, "--model", str(checkpoint), "--listen", "127.0.0.1:0", *flags))
    assert code == 2
    assert says in said
    assert len(said.strip().splitlines()) == 1
    assert last_words.read_text() == said.strip()


def test_a_taken_port_ends_the_real_worker_with_2(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = ended(start(REAL, "--model", str(checkpoint), "--listen", listen))
    assert (code, said) == (2, f"cannot listen on {listen}: Address already in use\n")


def test_a_peer_cannot_write_lines_into_the_log(checkpoint, socket_path):
    process = start(REAL, "--model", str(checkpoint), "--listen", f"unix:{socket_path}")
    await_socket(socket_path)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(socket_path)
        say_forged_goodbye(peer)
    process.terminate()
    code, said = ended(process, within_s=120)
    assert code == 0
    assert_only_own_lines(said)


def test_an_engine_that_fails_later_leaves_its_reason(model_dir, last_words):
    process = start(FAILING, "--model", str(model_dir), "--listen", "127.0.0.1:0")
    code, said = ended(process)
    assert code == 1, said
    assert last_words.read_text() == "the ranks do not stay up: rank 1 (pid 7) died"


def test_a_defect_is_named_without_its_details(model_dir, last_words):
    process = start(FAILING, "--model", str(model_dir), "--listen", "127.0.0.1:0", SCRIPTED_DEFECT="a prompt")
    code, said = ended(process)
    assert code == 1
    assert "\nRuntimeError" in json.loads(said.splitlines()[-1])["exception"]
    assert "a prompt" not in said
    assert last_words.read_text() == "the worker has a defect: RuntimeError; its log has more"


def test_a_machine_without_gpus_ends_a_worker_for_cuda_with_2(checkpoint, last_words):
    flags = ["--device", "cuda", "--tp", "2", "--min-shm", "1"]
    process = start(REAL, "--model", str(checkpoint), "--listen", "127.0.0.1:0", *flags, CUDA_VISIBLE_DEVICES="")
    code, said = ended(process, within_s=120)  # torch has to be imported to know
    assert code == 2, said
    assert last_words.read_text() == "device cuda with tp = 2 needs 2 GPUs; this machine has 0"
    assert said.strip().splitlines()[-1] == last_words.read_text()


@pytest.mark.parametrize(
    "flags", [["--tp", "0"], ["--listen", "nowhere"], ["--kv-memory", "much"], ["--colour", "red"]]
)
def test_wrong_settings_end_with_2(model_dir, flags, last_words):
    code, said = ended(start(SCRIPTED, "--model", str(model_dir), *flags))
    assert code == 2
    assert flags[0].strip("-").replace("-", "_") in said.replace("-", "_")
    assert said.startswith("usage:") or last_words.read_text() == said.strip()


def test_sigterm_lets_streams_end_and_exits_with_0(model_dir, socket_path):
    process = start(SCRIPTED, "--model", str(model_dir), "--listen", f"unix:{socket_path}", "--worker-id", "w9")
    await_socket(socket_path)
    await_ready(socket_path)
    assert "lockstep: worker w9" in Path(f"/proc/{process.pid}/cmdline").read_text()
    channel, call = serve_one(socket_path, max_tokens=20)
    with channel:
        read_until(call, "tokens")
        process.send_signal(signal.SIGTERM)
        rest = []
        with pytest.raises(grpc.RpcError) as caught:
            rest.extend(frame for frame in call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    code, said = ended(process)
    assert code == 0, said
    assert not os.path.exists(socket_path)


def test_a_second_signal_ends_at_once(model_dir, socket_path):
    process = start(SCRIPTED, "--model", str(model_dir), "--listen", f"unix:{socket_path}", "--drain-timeout-s", "60")
    await_socket(socket_path)
    await_ready(socket_path)
    channel, call = serve_one(socket_path, max_tokens=200)
    with channel:
        read_until(call, "tokens")
        process.send_signal(signal.SIGINT)
        draining = worker_pb2.WORKER_STATE_DRAINING
        next(frame for frame in call if frame.status.state == draining)
        process.send_signal(signal.SIGINT)
        code, _ = ended(process, within_s=30)
    assert code == 130


def runs(pid):
    """Whether a process runs; one whose parent has not waited for it has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False


def test_a_worker_does_not_outlive_its_parent(model_dir, socket_path):
    script = (
        "import subprocess, sys, os, time\n"
        "os.environ['LOCKSTEP_DIE_WITH_PARENT'] = str(os.getpid())\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    flags = ["--model", str(model_dir), "--listen", f"unix:{socket_path}"]
    parent = subprocess.Popen(
        [sys.executable, "-c", script, sys.executable, *SCRIPTED, *flags], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    await_socket(socket_path)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_help_describes_every_setting():
    code, said = ended(start(REAL, "--help"))
    assert code == 0
    assert "--kv-memory" in said
    assert "512Mi" in said
