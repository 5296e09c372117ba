from typing import Self

from headrace.log.chain import Step
from headrace.log.commit import Committer
from headrace.log.disk import Ran
from headrace.log.rounds import Committed
from headrace.log.staging import Round, Run

class Plan:
    runs: list[Run]
    steps: list[Step]
    def finish(self, ran: Ran) -> Committed: ...
    def mend(self, ran: Ran, result: Committed) -> Committed: ...

class InlinePlan(Plan):
    @classmethod
    def of(cls, committer: Committer, batch: Round, runs: list[Run]) -> Self | None: ...

class DirectPlan(Plan):
    @classmethod
    def of(cls, committer: Committer, runs: list[Run], is_async: bool = False) -> Self | None: ...
