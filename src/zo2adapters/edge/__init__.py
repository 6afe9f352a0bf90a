"""Programs that train in ExecuTorch's runtime: dual forwards of LoRA-FA, their lowering, and a way
to run them here.
"""
