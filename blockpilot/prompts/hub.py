"""Rows of a data set on the Hugging Face hub, or in its local cache."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockpilot.base.errors import UserError
from blockpilot.base.hub import without_retries
from blockpilot.base.json_values import first_line
from blockpilot.prompts.local import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HubRows:
    """The rows of one split, in the order of the hub.

    Attributes:
        repo: data set repository, or the name of a file format ("json") with `data_files` URLs.
        subset: configuration of the repository, or null for its only one.
        split: split of the repository; with `data_files` it is "train".
        revision: branch, tag or commit; null where `repo` is a file format.
        data_files: files or patterns to read instead of the repository's own configurations, for
            repositories that would need a loading script; null otherwise.
    """

    repo: str
    subset: str | None
    split: str
    revision: str | None
    data_files: Sequence[str] | None

    @property
    def described(self) -> str:
        return f"{self.repo} ({self.subset or 'default'}, {self.split}) on the Hugging Face hub"

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """The rows, reduced to those of `columns` that exist (all, if none is named).

        Raises:
            UserError: the hub cannot be reached, or has no such data set, subset or split.
        """
        import datasets

        try:
            with without_retries(self.repo):
                table = datasets.load_dataset(
                    self.repo,
                    self.subset,
                    split=self.split,
                    revision=self.revision,
                    data_files=list(self.data_files) if self.data_files is not None else None,
                )
        except Exception as error:  # datasets, the hub client and HTTP have a family of errors each
            log.debug("load_dataset failed", exc_info=True)
            raise UserError(
                f"cannot load {self.described}: {first_line(error)}; without a network, give the"
                " set's file with prompts.path=, a folder of sets as BLOCKPILOT_PROMPTS, or point"
                " HF_HOME to a cache that holds the data set"
            ) from error
        kept = [column for column in table.column_names if column in columns]
        for index, values in enumerate(table.select_columns(kept) if kept else table):
            yield Row(index, f"{self.repo}: row {index}", values)
