"""What the strangers talk to, as a process of the project's environment; it runs until its stdin is closed.

It prints one line of JSON, the base URLs of two systems:

`real`: what `lockstep serve` starts, for the reference model with the chat template of a model that calls tools, and
an embedding model's pooling. `scripted`: a router before a scripted worker, which always gives the same reasoning, text
and two calls.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "services/router/tests"))

from lockstep_router.text.tokenizer import Tokenizer
from lockstep_tools.serving.stack import Stack, StackSettings
from router_process import listening, start
from scripted_worker import Script, ScriptedWorker
from tool_models import HERMES_TEMPLATE, ids_of, model_of

REFERENCE = Path(__file__).resolve().parents[2] / "models/reference"
SAYS = """\
Two questions.
</think>

I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris", "days": 2}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"numbers": [1, 2]}}
</tool_call>"""
_START_S = 120.0


def tool_model(directory: Path) -> Path:
    """The reference model with a chat template for tools, and with pooling."""
    made = directory / "reference"
    (made / "1_Pooling").mkdir(parents=True)
    (made / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    for file in REFERENCE.iterdir():
        if file.name != "tokenizer_config.json":
            (made / file.name).symlink_to(file)
    config = json.loads((REFERENCE / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": HERMES_TEMPLATE}))
    return made


async def scripted(directory: Path, ended: asyncio.Task[str], urls: dict[str, str]) -> None:
    """Run the scripted system until stdin is closed."""
    model = model_of("thinking")
    ids = ids_of(Tokenizer(model["files"]), SAYS)
    script = Script(token=lambda _prompt_ids, _seed, at: ids[at], stop_after=len(ids))
    worker = await ScriptedWorker("w0", directory / "w0.sock", script=script, **model).start()
    router = await start("--workers", worker.target, "--port", "0")
    try:
        urls["scripted"] = f"http://127.0.0.1:{(await listening(router))['port']}/v1"
        print(json.dumps(urls), flush=True)
        assert router.stderr is not None
        draining = asyncio.create_task(router.stderr.read())
        await ended
        draining.cancel()
    finally:
        router.kill()
        await router.wait()
        await worker.kill()


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ls-") as path:
        directory = Path(path)
        settings = StackSettings(str(tool_model(directory)), workers=2, threads=1, device="cpu")
        with Stack(settings, output=sys.stderr.buffer) as stack:
            await asyncio.to_thread(stack.wait_ready, _START_S)
            ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
            await scripted(directory, ended, {"real": f"{stack.url}/v1"})


if __name__ == "__main__":
    asyncio.run(main())
