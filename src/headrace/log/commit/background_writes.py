"""Background disk work that keeps the sync of a round short: write-back of growing segments, and journal files made
ahead of need. The keeper does it."""

from collections.abc import Iterable

from headrace.log.commit.committer import Committer
from headrace.log.commit.context import CommitContext
from headrace.log.commit.round import LogEnd

WRITE_BACK_BYTES = 1 << 20  # more at once would delay the sync of a round for longer
WRITE_BACK_LOGS_MAX = 64


class BackgroundWrites:
    def __init__(self, context: CommitContext, committer: Committer) -> None:
        self._keeper = context.keeper
        self._files = context.files
        self._status = context.status
        self._committer = committer
        self._growing: set[LogEnd] = set()
        self._grown_bytes = 0
        self._is_writing_back = False
        self._is_making_journal = False

    def write_back(self, size: int, logs: Iterable[LogEnd]) -> None:
        """Start the write-back of segments while they grow. Otherwise a checkpoint would find all of their bytes
        unwritten, and the syncs of rounds would wait for the disk meanwhile."""
        self._growing.update(logs)
        self._grown_bytes += size
        if self._grown_bytes < WRITE_BACK_BYTES or self._is_writing_back:
            return
        growing, self._growing, self._grown_bytes = self._growing, set(), 0
        if len(growing) > WRITE_BACK_LOGS_MAX:
            return  # little of each: not worth that many calls
        writers = [log.tail.writer for log in growing]
        paths = [writer.segment.data_path for writer in writers if writer is not None]
        self._is_writing_back = True
        self._keeper.submit(lambda: self._files.start_writing_back(paths), self._wrote_back)

    def _wrote_back(self, _result: object, error: BaseException | None) -> None:
        self._is_writing_back = False
        if error is not None:
            self._status.fail(error)

    def make_journal_file(self) -> None:
        """Make the next journal file before a round needs it: it is 64 MB of zeros, for which its clients would
        wait."""
        journal = self._committer.journal
        if self._is_making_journal or not journal.wants_another:
            return
        if not self._committer.space.has_room_for(journal.file_bytes):
            return  # the round that needs the file is refused
        self._is_making_journal = True
        self._keeper.submit(journal.make_ahead, self._made_journal_file)

    def _made_journal_file(self, _result: object, error: BaseException | None) -> None:
        self._is_making_journal = False
        # Without room for it nothing is lost yet: the round that needs the file is refused.
        if error is not None and not (isinstance(error, OSError) and self._committer.lacks_room(error)):
            self._status.fail(error)
