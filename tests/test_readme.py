"""The README's promises that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_readme_first_two_commands_are_the_make_targets() -> None:
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert [command.strip() for command in commands[:2]] == ["make demo", "make test"]


def test_readme_example_is_the_one_that_runs() -> None:
    example = (ROOT / "examples" / "minimal_loop.py").read_text()
    [shown] = re.findall(r"```python\n(PROMPTS.*?)\n```", README, re.DOTALL)
    assert example.rstrip().endswith(shown)


def test_readme_links_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
