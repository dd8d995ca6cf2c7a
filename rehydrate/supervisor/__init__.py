"""Starts, watches and stops the processes that belong together. What each of them does is none of its business."""
