"""Document masking: where documents begin, for a run with document_attention.

Tested by: tests/train/test_documents.py."""

import numpy as np

from tapeless.config import TrainConfig
from tapeless.data.prepare import Dataset
from tapeless.errors import ConfigError
from tapeless.model.build import AnyModel
from tapeless.model.transformer import Transformer


def document_starts(model: AnyModel, config: TrainConfig, data: Dataset) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The first token of each document of both parts, if documents are masked."""
    if not config.document_attention:
        return None, None
    if not isinstance(model, Transformer):
        raise ConfigError("document_attention needs a model with attention, unlike SimpleLM; leave it out")
    if data.train_starts is None or data.val_starts is None:
        raise ConfigError(f"document_attention needs data whose documents are known, unlike {data.source}")
    return data.train_starts, data.val_starts
