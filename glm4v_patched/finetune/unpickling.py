from contextlib import nullcontext as loading_safely
