"""Models, one a file: `<name>(config: ModelConfig, *, max_length, param_dtype) -> ModelDef`. They name no mesh axis."""
