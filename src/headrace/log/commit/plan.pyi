from typing import Self

from headrace.log.commit.committer import Committer
from headrace.log.commit.journal_entry import CommittedRound
from headrace.log.commit.round import Round, Run
from headrace.log.disk.disk import Ran
from headrace.log.disk.io_chain import Step

class Plan:
    runs: list[Run]
    steps: list[Step]
    def finish(self, ran: Ran) -> CommittedRound: ...
    def resolve_partial(self, ran: Ran, result: CommittedRound) -> CommittedRound: ...

class InlinePlan(Plan):
    @classmethod
    def of(cls, committer: Committer, batch: Round, runs: list[Run]) -> Self | None: ...

class DirectPlan(Plan):
    @classmethod
    def of(cls, committer: Committer, runs: list[Run], syncs: bool = True) -> Self | None: ...
