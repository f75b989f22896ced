"""What the containers of a SageMaker training job run, in any image.

`entry` and what it imports need the standard library of Python 3.8 and nothing else: the environment of the stages is
made by them. No launcher of AWS's passes SIGTERM on to the training; this one does.
"""
