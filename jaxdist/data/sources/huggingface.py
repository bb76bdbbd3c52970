"""Examples for fine-tuning in a dataset of Hugging Face that is on the disk, or in Parquet files."""

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.source import Source
from jaxdist.data.text.source import source_of_files
from jaxdist.data.text.tables import table_examples, table_files

FACTS = SourceFacts(
    reads_files=True,
    path="a folder that save_to_disk wrote, a .parquet file, or a folder of such",
    val_path="such a file or folder, or null",
)


def huggingface(config: DataConfig) -> Source:
    """Samples as of `jsonl`, of the rows of a table: columns messages, prompt and completion, or text; others are not
    read.

    `data.path` is a folder that `save_to_disk` of the package datasets wrote (of several splits, `train`), or Parquet
    files. Nothing is downloaded, no code of the dataset is run, and the package datasets is not needed.

    Raises `UserError`: pyarrow is not installed; a file that is damaged; a row that is no example.
    """
    return source_of_files(config, "huggingface", table_files, table_examples)
