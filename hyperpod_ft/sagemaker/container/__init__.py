"""What the containers of a SageMaker training job run, in any image.

All of it needs the standard library of Python 3.8 and nothing else: it makes the environment of the stages, in which
`container_commands` run too. No launcher of AWS's passes SIGTERM on to the training; this one does.
"""
