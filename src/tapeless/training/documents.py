"""Where documents start, for document masking.

Tested by: tests/train/test_documents.py."""

import numpy as np

from tapeless.config import TrainConfig
from tapeless.data.prepare import Dataset
from tapeless.errors import ConfigError
from tapeless.model.build import AnyModel
from tapeless.model.transformer import Transformer


def document_starts(model: AnyModel, config: TrainConfig, data: Dataset) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Where the documents of both parts start, if attention is masked by document."""
    if not config.document_attention:
        return None, None
    if not isinstance(model, Transformer):
        raise ConfigError("document_attention needs a model with attention; leave it out for a SimpleLM")
    if data.train_starts is None or data.val_starts is None:
        raise ConfigError(f"document_attention needs document boundaries, which {data.source} does not have")
    return data.train_starts, data.val_starts
