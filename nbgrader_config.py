"""nbgrader's names for our two folders: instructors write in ``solutions/``, students get ``exercises/``."""

c = get_config()  # noqa: F821  (nbgrader provides it)

c.CourseDirectory.course_id = "distributed-training-live"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("your code goes here, in place of this line")'}
# A check may take 20 s for each number of ranks before it says that the ranks hang; the cell must live as long as that.
c.ExecutePreprocessor.timeout = 300
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__"]
