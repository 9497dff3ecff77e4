// Reads server-sent events from the body of an answer. Events: {id, data}.

const MAX_EVENT_CHARS = 1 << 20;

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const event = parse(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (event !== null) yield event;
      }
      if (buffer.length > MAX_EVENT_CHARS) throw new Error("an event is too long");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let id = null;
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    else if (line.startsWith("id:")) id = line.slice(3).trim();
  }
  return data.length ? { id, data: data.join("\n") } : null;
}
