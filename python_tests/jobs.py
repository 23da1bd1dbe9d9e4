"""Jobs of real processes, which may be killed and stopped."""

import contextlib
import os
import signal
import time

import torch.distributed as dist
from ranks import processes

HANGS = 120.0  # s after which a job is taken to hang, since all processes have begun
SILENT = 6.0  # s after which members are taken for dead, unlike the library's, so that the tests are short


class Process:
    """A process of a job, which reports something when it begins, and then its states."""

    def __init__(self, job, call):
        self.job, self.place = job, len(job.processes)
        self._team = job.stack.enter_context(processes.calling([call], fresh=True))
        self.states, self.final, self.error, self.has_begun = [], None, "", False
        job.processes.append(self)

    @property
    def is_over(self):
        return not self._team.busy

    def look(self):
        while self._team.busy and (event := self._team.next(0)):
            if event.kind == "raised":
                self.error = event.value
            elif event.kind == "returned":
                self.final = event.value
            elif event.kind == "reported" and self.has_begun:
                self.states.append(event.value)
            self.has_begun = True

    def send(self, signum):
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since the last look
                os.kill(self._team.pids[0], signum)

    def kill(self):
        self.send(signal.SIGKILL)

    def leave(self):
        self.job.store.set(f"leave/{self.place}", "")

    def stand_still(self, seconds):
        self.send(signal.SIGSTOP)
        self.job.standing.append((time.monotonic() + seconds, self))

    def stacks(self):
        self.send(signal.SIGCONT)
        return f"process {self.place}: {self.states[-1:]}\n{self.error}{self._team.stacks()}"


class Job:
    """The processes, and the store in which they find each other."""

    def __init__(self, stack):
        self.stack, self.processes = stack, []
        self.standing = []  # and when they go on
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._began = time.monotonic()

    @property
    def seconds(self):
        """Since all have begun: under load imports take long."""
        return time.monotonic() - self._began

    def until(self, condition):
        while not condition():
            for process in self.processes:
                process.look()
            for due in [due for due in self.standing if due[0] <= time.monotonic()]:
                due[1].send(signal.SIGCONT)
                self.standing.remove(due)
            if not all(process.has_begun or process.is_over for process in self.processes):
                self._began = time.monotonic()
            if self.seconds > HANGS:
                raise AssertionError("the job hangs:\n" + "\n".join(process.stacks() for process in self.processes))
            time.sleep(0.005)

    def wait(self, seconds):
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def stop(self):
        """Tell all to stop."""
        self.store.set("stop", "")
        self.until(lambda: all(process.is_over for process in self.processes))
