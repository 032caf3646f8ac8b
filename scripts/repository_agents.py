"""Three scripted agents for the task `repository`: one that knows the answer, one that does nothing, and a baseline between them.

The baseline sees what any agent sees. It takes the line of the test that failed, and, where that is a comparison which stands by
itself, changes one token after another in one program that it runs in its sandbox, until the comparison holds; then it makes that
edit. So it mends what one token broke and one line tells, and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable

from orchestrator.tasks.repository import RepositoryGame, RepositoryTask
from orchestrator.tasks.text_rewards import repository_tests
from orchestrator.tasks.vocabulary import CHARACTERS

Act = Callable[[str], Awaitable[str]]  # a turn's text -> what is seen next; "" at the end

_SEARCH = """
import glob,importlib,io,sys,tokenize
E=EXPRESSION
P=PACKAGE
S={'<':'<=','<=':'<','>':'>=','>=':'>','==':'!=','!=':'==','+':'-','-':'+','and':'or','or':'and','True':'False',
'False':'True','min':'max','max':'min','is not':'is','break':'continue','continue':'break','0':'None','extend':'append'}
def holds():
 for n in [n for n in sys.modules if n.split('.')[0]==P]:del sys.modules[n]
 importlib.invalidate_caches();g={}
 try:exec(f'import re,{P}\\nfrom {P} import *',g);return eval(E,g) is True
 except BaseException:return False
def tries():
 for f in sorted(glob.glob('**/*.py',recursive=True)):
  if f=='main.py':continue
  t=open(f).read();L=t.split('\\n')
  for k in list(tokenize.generate_tokens(io.StringIO(t).readline)):
   s=k.string;o=S.get(s) or (str(int(s)-1) if s.isdigit() and s!='0' else None)
   if o is None or k.start[0]!=k.end[0]:continue
   r=k.start[0]-1;l=L[r];n=l[:k.start[1]]+o+l[k.end[1]:]
   open(f,'w').write('\\n'.join([*L[:r],n,*L[r+1:]]))
   if holds():print(f,r+1);print(n);return
  open(f,'w').write(t)
tries()
"""


def _expression(line: str) -> str:
    """The comparison in a line of a test that stands by itself; empty: it is none."""
    try:
        call = ast.parse(line.strip(), mode="eval").body
    except SyntaxError:
        return ""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return ""
    shown = [f"({ast.unparse(argument)})" for argument in call.args]
    match call.func.attr, shown:
        case ("assertEqual" | "assertEquals", [first, second, *_]):
            return f"{first} == {second}"
        case ("assertAlmostEqual", [first, second, *_]):
            return f"abs({first} - {second}) < 1e-6"
        case ("assertTrue", [first, *_]):
            return f"bool{first}"
        case ("assertFalse", [first, *_]):
            return f"not {first}"
        case ("assertIsNone", [first, *_]):
            return f"{first} is None"
    return ""


async def baseline(payload: str, seen: str, act: Act) -> None:
    """See the module."""
    name, _, line = seen.partition(" ")[0], *seen.split("\n")[1:3]
    if expression := _expression(line):
        found = await act("run\n" + _SEARCH.replace("EXPRESSION", repr(expression)).replace("PACKAGE", repr(name)))
        place, _, text = found.partition("\n")
        if len(place.split()) == 2:
            path, number = place.split()
            await act(f"edit {path} {number} {number}\n{text.rstrip()}")
    await act("done")


async def oracle(payload: str, seen: str, act: Act) -> None:
    """Knows the right lines."""
    for _, answer in RepositoryTask(heldout=1).expert(payload):
        await act(answer)


async def null(payload: str, seen: str, act: Act) -> None:
    """Says that it is done."""
    await act("done")


AGENTS = {"oracle": oracle, "baseline": baseline, "null": null}


async def turns_of(agent: str, payload: str, task: RepositoryTask) -> list[str]:
    """What an agent says, turn after turn, in the task's own game."""
    game, said = RepositoryGame(payload, task.sandbox()), list[str]()

    async def act(text: str) -> str:
        if len(text) > task.max_response_tokens or len(said) >= task.max_turns:
            raise AssertionError(f"{agent}: a turn of {len(text)} characters, or one too many")
        said.append(text)
        return (await game.act(text)).text[: task.max_reply_tokens]

    await AGENTS[agent](payload, game.start(), act)
    return said


def reward_of(payload: str, turns: list[str]) -> float:
    """What the run's reward function says of these turns."""
    actions = [list(CHARACTERS.turn(text)) for text in turns]
    scored = repository_tests({"task": RepositoryTask.name, "prompt": payload, "actions": actions})
    return float(scored["reward"])
