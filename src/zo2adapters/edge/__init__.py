"""Programs that train LoRA-FA adapters in ExecuTorch's runtime: dual forwards, their export, and a runner."""
