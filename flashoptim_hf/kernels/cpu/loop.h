/* The loop over a page's groups, in threads. The including file has defined GROUP, and the types `hyper` and `planes`. */
typedef void (*run_groups)(const segment *, const hyper *, const planes *, const options *, int64_t first, int64_t last);

/* Groups that one task takes: enough to hide its start, few enough that threads finish together. */
#define TASK 256
static int64_t groups_of(const segment *s) { return (s->numel + GROUP - 1) / GROUP; }
static int64_t tasks_of(const segment *s) { return (groups_of(s) + TASK - 1) / TASK; }

/* Some of the tasks that nobody has taken, [result, *last): many at first, and in the end one by one, so that threads finish together though cores
 * are not equally fast and have other things to do. None are left where the two are equal. */
static int64_t take_tasks(int64_t *taken, int64_t tasks, int threads, int64_t *last) {
    int64_t first;
    #pragma omp critical(take_tasks)
    {
        first = *taken;
        *taken = *last = first + (tasks - first) / (4 * threads) + (first < tasks);
    }
    return first;
}

/* One step of every segment; segments must not overlap. `hypers` has `width` entries for each segment. */
static void run_page(
    run_groups run, const segment *segments, const hyper *hypers, int64_t width, int64_t count, const planes *where, const options *how,
    int threads) {
    int64_t tasks = 0, taken = 0;
    for (int64_t s = 0; s < count; s++) tasks += tasks_of(&segments[s]);
    if (threads > tasks) threads = (int)(tasks ? tasks : 1);
    #pragma omp parallel num_threads(threads)
    {
        int64_t s = 0, before = 0, task, last; /* tasks before segment s; each thread walks on from where it was */
        while ((task = take_tasks(&taken, tasks, threads, &last)) < last)
            for (; task < last; task++) {
                while (task >= before + tasks_of(&segments[s])) before += tasks_of(&segments[s++]);
                int64_t first = (task - before) * TASK, groups = groups_of(&segments[s]);
                run(&segments[s], hypers + s * width, where, how, first, first + TASK < groups ? first + TASK : groups);
            }
    }
}
