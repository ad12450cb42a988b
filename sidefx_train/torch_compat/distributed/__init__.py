"""Communication between processes: private names of ``torch.distributed``."""
