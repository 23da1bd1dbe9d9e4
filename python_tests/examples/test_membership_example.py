"""The example of sites that come and go: who the members are, and that they have the same parameters at the end."""

import re
import subprocess
import sys

import pytest
from ranks import ROOT

pytestmark = pytest.mark.needs("sklearn")

MEMBERS = re.compile(r"outer step (\d+): members ([\d, ]+)")
LAST = re.compile(r"test accuracy: (\S+)%; parameters of the members: (\w+), (\w+), (\w+)")


def test_sites_come_and_go() -> None:
    command = [sys.executable, ROOT / "examples" / "membership.py", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    by_event: list[list[set[int]]] = [[]]
    events = []
    for line in lines:
        if found := MEMBERS.fullmatch(line):
            by_event[-1].append({int(number) for number in found[2].split(",")})
            assert int(found[1]) == sum(map(len, by_event)), "it prints each outer step once"
        else:
            by_event.append([])
            events.append(line)
    assert events == ["a site is killed", "another site joins"]
    founders, survivors, final = (members[-1] for members in by_event)
    assert [len(founders), len(survivors), len(final)] == [3, 2, 3]
    assert survivors == founders & final
    accuracy, *digests = LAST.fullmatch(last).groups()
    assert float(accuracy) >= 90 and len(set(digests)) == 1
