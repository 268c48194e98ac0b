"""Errors of text, token files, tokenizers and files written by other software.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError


class DataError(TapelessError, ValueError):
    """Text, token files or tokenizers that cannot be trained on."""

    code = "DATA"
    exit_status = 2
    fix = "mend the file at the place that the message names"


class UntrustedFileError(TapelessError, ValueError):
    """A file of another make that is broken, would lead outside of its directory, or holds what no model does."""

    code = "FOREIGN"
    exit_status = 2
    fix = "get the directory again from where it came, or have transformers write it anew by save_pretrained"


NO_SUCH_PATH = Known(
    "NO_SUCH_PATH",
    DataError,
    "{path}: no such file or folder (looked in {folder})",
    "a `--dataset-path` that leads nowhere",
    "check the spelling, or give the whole path",
)
NO_FILES = Known(
    "NO_FILES",
    DataError,
    "{path}: {what}",
    "a folder or pattern in which there is no file with a suffix of text",
    "{fix}",
)
UNREADABLE = Known(
    "UNREADABLE",
    DataError,
    "{path}: cannot be read: {reason}",
    "a file that the operating system does not let this user read, or that a disk fails to deliver",
    "look at its owner and permissions",
)
EMPTY_DATA = Known(
    "EMPTY_DATA",
    DataError,
    "{path} is empty: there is nothing to train on",
    "a file of 0 bytes, or only such files",
    "give a file with text",
)
ONLY_WHITESPACE = Known(
    "ONLY_WHITESPACE",
    DataError,
    "{path} holds only whitespace: there is nothing to train on",
    "spaces and line ends, and nothing else",
    "give a file with text",
)
TOO_FEW_TOKENS = Known(
    "TOO_FEW_TOKENS",
    DataError,
    "the {part} part has {count} tokens, but one window of seq_len {seq_len} needs {needed}",
    "less text than one training window, or a held-out tenth that is shorter than one",
    "give more text or set --seq-len to {most} or less",
)
NOT_UTF8 = Known(
    "NOT_UTF8",
    DataError,
    "{path}: byte 0x{byte:02x} at offset {offset} is not UTF-8 ({reason})",
    "text in another encoding, or a damaged file; guessing would train a model on mojibake",
    "convert it, for example: iconv -f LATIN1 -t UTF-8",
)
OTHER_ENCODING = Known(
    "OTHER_ENCODING",
    DataError,
    "{path}: is {encoding}, expected UTF-8",
    "a byte order mark of UTF-16 or UTF-32, which some editors write",
    "convert it: iconv -f {encoding} -t UTF-8",
)
BINARY_FILE = Known(
    "BINARY_FILE",
    DataError,
    "{path}: byte {offset} is NUL, so this is a binary file",
    "an image, an archive, a program or weights where text is meant",
    "give UTF-8 text",
)
PICKLE = Known(
    "PICKLE",
    DataError,
    "{path}: is a pickle, which can run any code when it is read",
    "a file of `torch.save` or `pickle.dump`; nothing here ever unpickles",
    "give {expected}",
)
NOT_JSON = Known(
    "NOT_JSON",
    DataError,
    "{path}:{line}: not JSON: {reason}",
    "a line of a `.jsonl` file that is not one JSON value",
    "mend or remove the line",
)
NO_TEXT_FIELD = Known(
    "NO_TEXT_FIELD",
    DataError,
    "{path}:{line}: no field `{field}`, got {got}",
    "a line of a `.jsonl` file whose text has another name, or none",
    "name the field with --text-field, or remove the line",
)
BAD_RECORD = Known(
    "BAD_RECORD",
    DataError,
    "{path}:{line}: expected an object with a string `{field}`, got {got}",
    "a line of a `.jsonl` file or a row of a table whose `text`, or whatever `--text-field` names, is no text",
    "mend or remove it, or name another with --text-field",
)
NO_COLUMN = Known(
    "NO_COLUMN",
    DataError,
    "{path}: no column `{field}`, got {got}",
    "a Parquet file or a dataset whose text has another name, or none",
    "name the column with --text-field",
)
NOT_WHOLE = Known(
    "NOT_WHOLE",
    DataError,
    "{path}: not a whole {form} file: {reason}",
    "a table, a `.gz` or a `.zst` file that was cut short, or that only has the name of one",
    "get the file again",
)
BAD_TOKEN_FILE = Known(
    "BAD_TOKEN_FILE",
    DataError,
    "{path}: {got}, expected {expected}",
    "a token file of a kind or version that is not read here, or one that was cut short",
    "get the file again; those of tapeless, of llm.c (magic 20240520, version 1) and of nanoGPT (plain uint16) are read",
)
NO_TOKENIZER = Known(
    "NO_TOKENIZER",
    DataError,
    "{path}: token files say nothing of their tokenizer{pickle}",
    "token files of nanoGPT or llm.c, and no `--tokenizer`; guessing one would show wrong text and wrong bits per byte",
    "give --tokenizer FILE; `tapeless tokenizer train TEXT --kind char --out FILE` makes the one of nanoGPT's characters",
)
BEYOND_VOCABULARY = Known(
    "BEYOND_VOCABULARY",
    DataError,
    "{path}: token {index} is {token}, outside of the vocabulary of {vocab_size}",
    "a token file that was altered, or made by another tokenizer; an id is never clamped",
    "tokenize with the tokenizer that belongs to it",
)
