"""Chat templates of an attacker: no work or memory without bound, no way to Python's objects."""

import os
import signal
import threading

import pytest
from conftest import lanes
from spent import at_most
from tiny_tokenizer import QWEN_LIKE

from rljax.data.text import guarded
from rljax.data.text.template import ChatTemplate
from rljax.errors import InputError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
DOUBLED = "{%% set ns = namespace(s=%s, n=9) %%}{%% for i in range(60) %%}%s{%% endfor %%}"


def doubled(start, step):
    return DOUBLED % (start, "{% set ns.s = " + step + " %}") + "{{ ns.s|length }}"


def render(template, messages=MESSAGES, **tokens):
    return ChatTemplate(template, "models/foreign.jinja").render(
        messages, special_tokens=tokens, add_generation_prompt=True
    )


# What fills the memory.
MEMORY = {
    "~": doubled("'x'", "ns.s ~ ns.s"),
    "+": doubled("'x'", "ns.s + ns.s"),
    "lists": doubled("[1]", "ns.s + ns.s"),
    "tuples": doubled("(1,)", "ns.s + ns.s"),
    "*": doubled("'x'", "ns.s * 9"),
    "list *": "{{ ([1] * 10**9)|length }}",
    "join": doubled("'x'", "[ns.s, ns.s]|join(ns.s)"),
    "replace": doubled("'xx'", "ns.s|replace('x', ns.s)"),
    "%": "{{ '%1000000000d' % 1 }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "str.format": "{{ '{:1000000000d}'.format(1) }}",
    "format of a format": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent": "{{ ('\\n' * 99999)|indent(10**6, true) }}",
    "tojson indent": "{{ messages|tojson(indent=10**9) }}",
    "batch": "{{ messages|batch(10**9, 'x')|list }}",
    "slice": "{{ messages|slice(10**9)|list }}",
    "bytes": "{{ 'x'.encode('utf-8') * 10**9 }}",
    "range": "{{ range(100000)|list * 10**4 }}",
    "shift": "{{ 2 ** (2 ** 34) }}",
    "constants of a filter": "{{ 'x'|center(1000000000) }}{{ messages[0].role }}",
    "macro": "{% macro f(s) %}{{ f(s ~ s) }}{% endmacro %}{{ f('x') }}",
    "block set": DOUBLED % ("'x'", "{% set y %}{{ns.s}}{{ns.s}}{% endset %}{% set ns.s = y %}"),
}
# What takes the processor.
TIME = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over texts": "{% set s = 'x' * 99999 %}{% for a in s %}{% for b in s %}{% for c in s %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "numbers": doubled("9", "ns.s * ns.s"),
    "powers": "{{ 9 ** (9 ** 9) }}",
    "a text of a number": "{{ (7 ** (10 ** 7)) % (3 ** (10 ** 7)) }}",
    "wordwrap": "{{ ('x y ' * 10**7)|wordwrap(1) }}",
    "urlize": "{{ ('http://a.b ' * 10**6)|urlize }}",
    "sort": "{{ (range(100000)|list * 50)|sort(reverse=true)|length }}",
    "unique": "{{ (range(100000)|list * 90)|map('string')|unique|list|length }}",
    "groupby": "{% for i in range(999) %}{{ (range(99999)|list)|groupby('real')|length }}"
    "{% endfor %}",
    "dictsort": "{% for i in range(9999) %}{{ dict(a=range(99999)|list)|dictsort|length }}"
    "{% endfor %}",
    "maps": "{{ range(99999)|map('string')|map('center', 9999)|join|length }}",
    "sum of lists": "{{ (messages * 5000)|map(attribute='role')|map('list')|sum(start=[])|length }}"
    * 30,
    "cycler": "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "numbers as text": "{{ (7 ** (2 ** 22))|string|length }}",
}
# What is refused by its length, its depth, or jinja itself.
OTHER = {
    "output": "{% for i in range(9999) %}{{ 'abc' * 3333 }}{% endfor %}",
    "brackets": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "lists in lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "ifs": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "blocks": "".join(f"{{% for i in [1] %}}{i}" for i in range(40)) + "{% endfor %}" * 40,
    "macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "include": "{% include 'models/foreign.jinja' %}",
    "extends": "{% extends 'models/foreign.jinja' %}",
    "import": "{% import '/etc/passwd' as p %}",
    "range": "{% for i in range(99999999) %}x{% endfor %}",
    "lipsum": "{{ lipsum(10**9) }}",
    "refusal": "{{ raise_exception('x' * 10**7) }}",
}
SAMPLE = ("lists", "bytes", "%", "macro", "loops over texts", "recursive loop")
SAMPLE += ("output", "brackets", "blocks", "macro of itself", "include", "range")
EVERY = {**MEMORY, **TIME, **OTHER}


@pytest.mark.parametrize("name", lanes(SAMPLE, [name for name in EVERY if name not in SAMPLE]))
def test_a_bomb_is_refused_within_its_limits_and_the_next_template_is_served(name):
    with at_most(5), pytest.raises(InputError) as caught:  # elsewhere, where the kernel limits it
        render(EVERY[name])
    assert "models/foreign.jinja" in str(caught.value) and len(str(caught.value)) < 3_000
    assert render("{{ messages[0].content }}") == "hi"


def test_limits_grow_with_what_is_rendered():
    long = [{"role": "user", "content": "word " * 1_000_000}]
    assert len(render("{{ messages[0].content }}{{ messages[0].content }}", long)) == 10_000_000
    with pytest.raises(InputError, match="writes more than"):
        render("{{ messages[0].content * 9 }}", long)


# Ways to Python's objects; a rendering of any of them must show none and run nothing.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ (messages|map(attribute='__class__'))|list }}",
    "{{ messages|map(attribute='content.__class__')|list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__mro__}'|format(1) }}{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(messages) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict(a=1).__class__.__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ range.__class__ }}",
    "{{ (messages|tojson).__class__ }}",
    "{% macro f() %}{{ caller.__code__ }}{% endmacro %}{{ f.__code__ }}",
    "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop._iterator.__class__ }}{% endfor %}",
    "{{ (messages|batch(1)).gi_frame.f_globals }}",
    "{{ (x for x in messages).gi_code }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages.sort() }}",
    "{{ messages[0].pop('role') }}",
    "{% set messages[0].role = 'x' %}",
    "{{ context }}{{ environment.loader }}{{ ''|attr('for' ~ 'mat')|attr('__self__') }}",
    "{{ 'a'.join.__self__.__class__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ url_for.__globals__ }}{{ config.__class__.__init__ }}",
    "{{ get_flashed_messages.__globals__.__builtins__ }}",
    "{{ [].__class__.__base__ }}{{ ().__class__ }}",
    "{{ (1).__class__ }}{{ 1.5.__class__ }}{{ none.__class__ }}",
    "{% generation %}{{ caller.__globals__ }}{% endgeneration %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_reaches_python(template):
    try:
        text = render(template)
    except InputError:
        return
    assert not any(word in text for word in ("class ", "<function", "builtins", "uid=", "module"))


def test_the_messages_are_not_changed_by_a_rendering():
    before = [dict(message) for message in MESSAGES]
    with pytest.raises(InputError):
        render("{{ messages[0].update(role='system') }}")
    assert before == MESSAGES


def test_a_process_that_is_ended_from_outside_is_started_again():
    template = ChatTemplate(QWEN_LIKE, "t")
    options = dict(special_tokens={}, add_generation_prompt=True)
    whole = template.render(MESSAGES, **options)
    child = guarded._process(os.getpid()).child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert template.render(MESSAGES, **options) == whole


def test_an_interrupted_rendering_leaves_no_reply_for_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for wait_s in (0.05, 0.1):
            signal.setitimer(signal.ITIMER_REAL, wait_s)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    render("{% for i in range(30000) %}{% endfor %}late")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render("{{ messages[0].content }}") == "hi"


def test_threads_share_the_process():
    template, texts = ChatTemplate("{{ messages[0].content }}", "t"), {}

    def work(number):
        options = dict(special_tokens={}, add_generation_prompt=True)
        messages = [{"role": "user", "content": str(number) * 2_000}]
        texts[number] = {template.render(messages, **options) for _ in range(20)}

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: {str(n) * 2_000} for n in range(6)}


def test_a_fork_has_a_process_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}", "t")
    options = dict(special_tokens={}, add_generation_prompt=True)
    template.render(MESSAGES, **options)
    pid = os.fork()
    if not pid:
        good = template.render(MESSAGES, **options) == "hi"
        guarded._process(os.getpid()).end()
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert template.render(MESSAGES, **options) == "hi"
