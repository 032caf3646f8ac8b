"""An agent that knows nothing but a base URL and a key, and trains: it asks for a number above its start state.

Three tries. The last line that it prints is the reward: 1 for such a number, 0.6 for another number, else half the share of
digits in its best answer. Standard library only; any OpenAI client would do (they read the same two variables).
"""

import json
import os
import sys
import urllib.request

TRIES = 3


def ask(messages: list[dict[str, str]]) -> str:
    """What the policy answers."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


def score(said: str, least: int) -> float:
    """Of one answer."""
    if said.isascii() and said.isdigit():
        return 1.0 if int(said) > least else 0.6
    return 0.5 * sum(letter in "0123456789" for letter in said) / max(1, len(said))


def main() -> None:
    least = int(sys.stdin.read())
    messages = [{"role": "user", "content": f"above {least}"}]
    best = 0.0
    for _ in range(TRIES):
        said = ask(messages)
        best = max(best, score(said, least))
        if best >= 0.6:
            break
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "a number"}]
    print(best)


if __name__ == "__main__":
    main()
