"""Chat templates: what transformers knows besides Jinja, what cannot be compiled, bounds on time and memory."""

import logging
import tracemalloc

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.generation.prompts import PromptEncoder
from lockstep_router.generation.request import Conversation, Turn
from lockstep_router.memory import MemoryTrimmer
from lockstep_router.output import ModelFormats
from lockstep_router.text import template_budget
from lockstep_router.text.chat_template import ChatTemplate
from lockstep_router.text.threads import INLINE_CHARS, TextThreads
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import eventually
from scripted_worker import model_card, tokenizer_files

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
BROKEN = "{% for m in messages %}\n{% unheard_of %}\n{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = "('a' * 20000)"
LISTED = f"([{LONG}] * 2100)"
OF_40_MI_CHARS = [
    *(
        f"{{% set x = 'a' * 10 * 2 ** 20 %}}{{{{ {expression} }}}}"
        for expression in (
            "x ~ x ~ x ~ x",
            "x + x + x + x",
            "[x, x, x, x]",
            "'%s%s%s%s' % (x, x, x, x)",
            "x ~ [x, x, x]",
        )
    ),
    "{% set x = 'a' * 2 ** 24 %}{% set x = x + x %}{% set x = x + x %}",
    "{% set l = [0] * 2 ** 20 %}{{ (l + l + l) | length }}",
    f"{{{{ {LONG}.replace('a', 'b' * 2100) }}}}",
    f"{{% for _ in [1] %}}{{{{ {LONG}.replace('a', 'b' * 2100) }}}}{{% endfor %}}",
    f"{{{{ {LONG} | replace('a', 'b' * 2100) }}}}",
    f"{{{{ [{LONG}] | map('replace', 'a', 'b' * 2100) | list }}}}",
    f"{{{{ {LISTED} | join }}}}",
    f"{{{{ {LISTED} | map('trim') | join }}}}",
    f"{{{{ range(2100) | join({LONG}) }}}}",
    f"{{{{ ''.join({LISTED}) }}}}",
    f"{{{{ {LONG}.join({LONG}) }}}}",
    *(f"{{{{ {LISTED} | {name} }}}}" for name in ("tojson", "string", "upper", "trim", "replace('b', 'c')", "escape")),
    f"{{{{ {LISTED} }}}}",
    f"{{{{ {{'a': {LISTED}}}.items() }}}}",
    f"{{{{ raise_exception({LISTED}) }}}}",
    f"{{{{ '%s' % ({LISTED},) }}}}",
    f"{{{{ ('%(a)s' * 2100) % {{'a': {LONG}}} }}}}",
    f"{{{{ ('%(a)s' * 2100) | format(a={LONG}) }}}}",
    f"{{{{ ('{{0}}' * 2100).format({LONG}) }}}}",
    f"{{{{ ('{{a}}' * 2100).format(a={LONG}) }}}}",
    f"{{{{ ('{{a}}' * 2100).format_map({{'a': {LONG}}}) }}}}",
    "{{ ('%999d' * 42000) % {'a': 1} }}",
    "{{ [1] | tojson(separators=('x' * 2 ** 24, 'x' * 2 ** 24)) }}",
    "{{ ([1] * 50000) | tojson(indent=999) }}",
    f"{{{{ ('\n' * 2100) | indent({LONG}, blank=true) }}}}",
    "{{ ('\t' * 42000).expandtabs(1000) }}",
    "{% set x = 'a ' * 2 ** 22 %}{{ x.split() | length }}",
    "{% set x = 'a ' * 2 ** 22 %}{{ x.split(' ') | length }}",
    "{% set x = 'a\n' * 2 ** 22 %}{{ x.splitlines() | length }}",
    *(f"{{% set x = 'ab' * 2 ** 21 %}}{{{{ x | {name} }}}}" for name in ("list", "sort", "unique", "dictsort")),
    "{% set x = 'ab' * 2 ** 22 %}{{ x | title }}",
    "{% set x = 'ab' * 2 ** 21 %}{{ '%s'.format(*x) }}",
    "{% set ns = namespace(l=['x']) %}{% for _ in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(x=1) %}{% for _ in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
]


def test_generation_blocks_stand_for_their_content():
    source = (
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'assistant' %}\n"
        "        {%- generation %}\n"
        "        {%- set end = '!' %}\n"
        "        {{- m.content + end }}\n"
        "        {%- endgeneration %}\n"
        "    {%- else %}{{- m.content + '?' }}{%- endif %}\n"
        "{%- endfor %}{{ end }}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES) == "hi?yes!"


def test_template_that_cannot_be_compiled_leaves_a_tokenizer_without_one(caplog):
    with caplog.at_level(logging.WARNING, "lockstep.router"):
        tokenizer = Tokenizer(tokenizer_files(BROKEN))
    assert tokenizer.chat_template is None
    assert tokenizer.template_problem.startswith("chat template: Encountered unknown tag 'unheard_of'")
    assert tokenizer.template_problem.endswith("(line 2)")
    assert tokenizer.template_problem in caplog.text
    assert tokenizer.encode("hi")


async def test_model_whose_template_cannot_be_compiled_completes_texts_and_says_why_it_does_not_chat(make_cluster):
    cluster = await make_cluster(1, ready=False)
    worker = cluster.workers[0]
    worker.files = tokenizer_files(BROKEN)
    await worker.restart()
    await eventually(cluster.router.workers.ready)
    assert (await cluster.complete("hello", max_tokens=2)).status_code == 200
    response = await cluster.chat()
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "has no usable chat template: Encountered unknown tag 'unheard_of'" in message
    assert "/v1/completions" in message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%.*f' | format(10**9, 1) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ messages | tojson(indent=10**10) }}",
        "{% set x = 'x' * 2**20 %}{% for _ in range(33) %}{{ x }}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for _ in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('x') }}",
        *OF_40_MI_CHARS,
    ],
)
def test_values_that_would_take_the_memory_are_refused(source):
    with pytest.raises(LockstepError, match=r"more than [0-9]+ (characters|bits)") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("source", OF_40_MI_CHARS)
def test_large_values_are_refused_before_they_are_made(source):
    template = ChatTemplate(source, {})
    tracemalloc.start()
    try:
        with pytest.raises(LockstepError, match=r"more than [0-9]+ characters"):
            template.render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 120 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'.encode() }}",
        "{{ 'x'.translate({120: 'y'}) }}",
        "{{ 1.to_bytes(10 ** 10, 'little') }}",
        "{{ messages | pprint }}",
        "{{ ([[0]] * 9) | sum(start=[]) }}",
        "{{ '{0.x}'.format(namespace(x='y')) }}",
        "{{ 1 | round(10 ** 10, 'ceil') }}",
        "{{ strftime_now('%Y' * 1000) }}",
    ],
)
def test_templates_do_not_have_what_makes_values_without_a_bound(source):
    with pytest.raises((LockstepError, ValueError), match=r"unsafe|No filter named|numbers|part of a value|more than"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for _ in range(999) %}{{ big | tojson | length }}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for _ in range(999) %}{% set ns.x = [ns.x, big * 2] %}{% endfor %}",
        "{% for _ in range(999) %}{% set x = [big] | string %}{% endfor %}",
        "{% macro f() %}{{ big }}{{ big }}{% endmacro %}{% for _ in range(999) %}{% set x = f() %}{% endfor %}",
    ],
)
def test_all_values_of_a_rendering_together_have_a_bound(source):
    with pytest.raises(LockstepError, match=r"makes values of more than [0-9]+ characters"):
        ChatTemplate("{% set big = 'a' * 2 ** 21 %}" + source, {}).render(MESSAGES)


def test_values_may_have_as_many_characters_as_the_bound():
    source = "{{ ('a' * 2 ** 21 ~ 'b') | replace('b', 'c' * 2 ** 21) | length }}{{ ['a' * 2 ** 22] | join | length }}"
    assert ChatTemplate(source, {}).render(MESSAGES) == f"{2**22}{2**22}"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1]) }}{{ loop([n - 1]) }}{% endif %}{% endfor %}",
        "{% for a in range(99999) | select %}{% for b in range(99999) | select %}{% endfor %}{% endfor %}",
    ],
)
def test_renderings_without_an_end_are_refused(source, monkeypatch):
    monkeypatch.setattr(template_budget, "CPU_S", 0.06)
    template = ChatTemplate(source, {})
    template.is_slow = False
    with pytest.raises(LockstepError, match=r"it takes more than 0\.1 s"):
        template.render(MESSAGES)
    assert template.is_slow


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "ababab1210243"),
        ("{{ '%5d|%s|%d' % (7, '2024', 1700000000) }}", "    7|2024|1700000000"),
        ("{{ '100%%12345: %s' | format('x') }}", "100%12345: x"),
        ("{{ '{:>3}, 50%, 12345: {}'.format(7, 1700000000) }}", "  7, 50%, 12345: 1700000000"),
        ("{{ '{{\"id\": {}}}'.format(1700000000) }}", '{"id": 1700000000}'),
        ("{{ 'ab'.rjust(4) }}{{ 'a\nb' | indent(2) }}", "  aba\n  b"),
        ("{% for i in range(99) %}{% if loop.last %}{{ loop.length }} {{ i }}{% endif %}{% endfor %}", "99 98"),
        ("{% for i in range(99) | select('odd') %}{% if loop.last %}{{ i }}{% endif %}{% endfor %}", "97"),
        ("{% macro f(a, b='c') %}{{ a ~ b }}{% endmacro %}{{ f('x') }}{{ f(1, [2]) }}", "xc1[2]"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        (
            "{{ 'a-b'.replace('-', '+', 1) }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'a,b,c'.split(',', 1) }}",
            "a+bbba['a', 'b,c']",
        ),
        (
            "{{ 'x' ~ 1 ~ none ~ [true, {'a': 'é'}] }}{{ [1, 'b'] | join('-') }}{{ ', '.join(['a', 'b']) }}",
            "x1None[True, {'a': 'é'}]1-ba, b",
        ),
        (
            "{{ messages | join(' ', attribute='content') }}{{ messages | map(attribute='role') | list }}",
            "hi yes['user', 'assistant']",
        ),
        (
            "{{ {'b': [1, '\"'], 'a': none} | tojson }}{{ [1] | tojson(indent=2) }}",
            '{"b": [1, "\\""], "a": null}[\n  1\n]',
        ),
        (
            "{{ 'b a' | title }}{{ 'abc' | list | reverse | join }}{{ [2, 1] | sort }}{{ [1, 2] | sum }}",
            "B Acba[1, 2]3",
        ),
        (
            "{{ ' a' | trim | upper | string }}{{ [] | string }}{{ missing }}{{ 2.5 | round | int }}{{ '<' | e }}",
            "A[]2&lt;",
        ),
        ("{% for x in 'a b'.split() %}{{ '{}{a}'.format(x, a=1) }}{{ '%s' | format(x) }}{% endfor %}", "a1ab1b"),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{{ 'a\nb'.splitlines() }}",
            "a1B['a', 'b']",
        ),
        (
            "{{ '%(a)s %(b)5.1f %%' % {'a': [1], 'b': 2} }}{{ (1, 2) + (3,) }}{{ 'a' + 'b' }}{{ 1 + 2 }}",
            "[1]   2.0 %(1, 2, 3)ab3",
        ),
        ("{% for m in missing %}{% else %}none{% endfor %}", "none"),
    ],
)
def test_bounds_leave_what_templates_do(source, text):
    assert ChatTemplate(source, {}).render(MESSAGES) == text


def test_a_long_conversation_has_time_for_each_message(monkeypatch):
    monkeypatch.setattr(template_budget, "CPU_S", 0.0)
    messages = MESSAGES * 5_000
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert len(ChatTemplate(source, {}).render(messages)) == 25_000


class RecordingThreads(TextThreads):
    """Notes the length by which it decides where work is done."""

    chars = 0

    async def run(self, work, chars, *, chars_together=0):
        self.chars = max(chars, chars_together)
        return await super().run(work, chars, chars_together=chars_together)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_slow_templates_are_not_rendered_on_the_event_loop(is_slow):
    threads = RecordingThreads(1, MemoryTrimmer())
    try:
        tokenizer = Tokenizer(tokenizer_files())
        tokenizer.chat_template.is_slow = is_slow
        encoder = PromptEncoder(threads, control_tokens=False, formats=ModelFormats({}, {}))
        source = Conversation((Turn("user", "hi"),))
        assert (await encoder.encode_all([source], tokenizer, model_card()))[0].ids
        assert (threads.chars > INLINE_CHARS) is is_slow
    finally:
        threads.stop()
