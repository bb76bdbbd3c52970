"""Where records of metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow. One sink a file."""

from jaxdist.observe.sinks.image import Image
from jaxdist.observe.sinks.sinks import Sink, Sinks, make_sinks

__all__ = ["Image", "Sink", "Sinks", "make_sinks"]
