/* keeper: runs one program and remains the ancestor of all processes that the program starts.
 *
 *     keeper LISTENER SPEC
 *
 * The arguments are numbers of inherited descriptors. The keeper is a child subreaper (prctl(2)), so a descendant remains a
 * descendant until it exits, even if it changes its session, group or environment or its parents exit. (It can only move
 * below another keeper, by forking in a PID namespace that a process there provides.) The keeper reaps its children, informs
 * the connected agent when the program or a watched process has exited and when no descendants are left, and kills all
 * descendants on request. It outlives the agent: once no descendants are left, it waits for an agent to read the result and
 * send "release", or for SIGTERM.
 *
 * SPEC is a file of NUL-terminated strings "KEY=VALUE"; see run_program. LISTENER is a listening Unix socket of type
 * SOCK_SEQPACKET. Only the agent that connected last is served. It sends one request per packet:
 *
 *     state                 only send the answer
 *     watch SLOT PID SINCE  record in this slot how PID exits, or how it has exited if that was after SINCE (in ms since
 *                           boot; an earlier exit was that of another process with the same pid)
 *     kill                  kill all descendants until none is left
 *     release               exit once no descendants are left
 *
 * The answer is "ok", or "error" with a reason, followed by the state; see send_state. The agent also gets the state when
 * it connects and whenever the state changes. The agent skips words that it does not know.
 *
 * The command line contains neither the program nor its service, because job scripts search for both with pgrep. The keeper
 * allocates no memory (except where the kernel lacks CONFIG_PROC_CHILDREN), so it keeps working when no memory is left.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { VERSION = 1, MAX_EXITS = 256, MAX_SLOTS = 17, MAX_REAPED = 65536, MAX_HELD = 16384, MAX_PAUSE_MS = 500 };

struct ending { /* How a process ended. If at_ms is 0, it has not ended. */
    pid_t pid;
    int status;      /* As from waitpid. */
    long long at_ms; /* Since boot. */
};

struct report { /* A failed step, sent by the child before it has executed the program. */
    char step[16];
    int error;
};

static struct ending slots[MAX_SLOTS]; /* The first slot is for the program. */
static struct ending exits[MAX_EXITS]; /* A ring buffer of exits, in case an agent asks about them only later. */
static struct report failure;
static unsigned long reaped;
static int listener, agent = -1, reports = -1, children = -1;
static int living, held; /* Number of living and of unreaped dead children in the last round of kills. */
static int is_childless, is_killing, is_released, is_unsent;

/* --- the program ----------------------------------------------------------------------------------------------------- */

static void fail(int to, const char *step, int error)
{
    struct report made = {.error = error};
    strncpy(made.step, step, sizeof made.step - 1);
    (void)!write(to, &made, sizeof made); /* The exit status says the same if the keeper no longer reads. */
    _exit(127);
}

/* Follow one instruction of the spec. Return a negative number and set errno if it fails. */
static int follow(const char *key, const char *value)
{
    char *end;
    unsigned long number = strtoul(value, &end, 10);
    int is_id = end > value && !*end && number < (uid_t)-1; /* With -1, setresuid would do nothing and leave root. */
    int resource;
    unsigned long long soft, hard;
    if (!strcmp(key, "cwd"))
        return chdir(value);
    if (!strcmp(key, "limit") && sscanf(value, "%d:%llu:%llu", &resource, &soft, &hard) == 3)
        return setrlimit(resource, &(struct rlimit){soft, hard});
    if (!strcmp(key, "nice"))
        return setpriority(PRIO_PROCESS, 0, atoi(value));
    if (!strcmp(key, "groups"))
        return setgroups(0, NULL);
    if (!strcmp(key, "gid") && is_id)
        return setresgid(number, number, number);
    if (!strcmp(key, "uid") && is_id)
        return setresuid(number, number, number);
    errno = EINVAL;
    return -1;
}

/* Follow the instructions of the spec in order, then execute the program. The order is the agent's responsibility: for
 * example, instructions that need root must precede "uid". */
static void run_program(int spec, int to)
{
    struct stat about;
    char *text = MAP_FAILED, *path = NULL, **argv, **env;
    if (fstat(spec, &about) == 0 && about.st_size > 0)
        text = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, spec, 0);
    if (text == MAP_FAILED || text[about.st_size - 1] != '\0')
        fail(to, "spec", EINVAL);
    /* A string takes at least five bytes ("arg=" and NUL), so this has room for all of them and a NULL. */
    argv = calloc(about.st_size / 5 + 1, sizeof *argv);
    env = calloc(about.st_size / 5 + 1, sizeof *env);
    if (!argv || !env)
        fail(to, "memory", ENOMEM);
    char **next_arg = argv, **next_variable = env;
    for (char *key = text, *next; key < text + about.st_size; key = next) {
        next = key + strlen(key) + 1;
        char *value = strchr(key, '=');
        if (!value)
            fail(to, "spec", EINVAL);
        *value++ = '\0';
        if (!strcmp(key, "exec"))
            path = value;
        else if (!strcmp(key, "arg"))
            *next_arg++ = value;
        else if (!strcmp(key, "env"))
            *next_variable++ = value;
        else if (follow(key, value) < 0)
            fail(to, key, errno);
    }
    if (!path)
        fail(to, "spec", EINVAL);
    execve(path, argv, env);
    fail(to, "exec", errno);
}

/* Fork a child that runs the program in a new session, with no signal blocked or ignored. */
static void start(int spec)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        exit(errno);
    slots[0].pid = fork();
    if (slots[0].pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        for (int number = 1; number < NSIG; number++)
            signal(number, SIG_DFL);
        sigprocmask(SIG_SETMASK, &none, NULL);
        setsid();
        run_program(spec, ends[1]);
    }
    if (slots[0].pid < 0)
        failure = (struct report){"fork", errno};
    close(ends[1]);
    reports = ends[0];
}

static void read_report(void)
{
    struct report got;
    if (read(reports, &got, sizeof got) == sizeof got) {
        failure = got;
        return;
    }
    close(reports); /* The child has closed its end of the pipe, so either the program runs or the child has ended. */
    reports = -1;
    is_unsent = 1;
}

/* --- the processes below --------------------------------------------------------------------------------------------- */

/* Reap dead children. Return whether there may be more. */
static int reap(void)
{
    for (int count = 0; count < MAX_REAPED; count++) {
        struct timespec now;
        struct ending ended;
        ended.pid = waitpid(-1, &ended.status, WNOHANG | __WALL);
        if (ended.pid <= 0) {
            /* This is final, because without children, no process is left that could leave an orphan to the keeper. */
            if (ended.pid < 0 && errno == ECHILD && !is_childless)
                is_childless = is_unsent = 1;
            return 0;
        }
        if (WIFSTOPPED(ended.status)) /* A child has made the keeper its tracer (PTRACE_TRACEME), and got a signal. */
            continue;
        clock_gettime(CLOCK_BOOTTIME, &now);
        ended.at_ms = now.tv_sec * 1000LL + now.tv_nsec / 1000000;
        exits[reaped++ % MAX_EXITS] = ended;
        for (struct ending *slot = slots; slot < slots + MAX_SLOTS; slot++)
            if (slot->pid == ended.pid && !slot->at_ms) {
                *slot = ended;
                is_unsent = 1;
            }
    }
    return 1;
}

/* Kill a child and the process group that it leads, and count it. Pids that are not children are ignored.
 *
 * This cannot affect other processes: a child keeps its pid until it is reaped, which only this program does, and a group
 * with that id was created by that child, in a session that began below the keeper. */
static void kill_child(pid_t pid)
{
    siginfo_t ended = {0};
    if (waitid(P_PID, pid, &ended, WEXITED | WNOHANG | WNOWAIT | __WALL) < 0)
        return;
    if (ended.si_pid == pid && ended.si_code != CLD_TRAPPED) { /* As in reap, a stop is not an exit. */
        held++;
        return;
    }
    living++;
    kill(-pid, SIGKILL);
    kill(pid, SIGKILL);
}

static void kill_children(void)
{
    char text[4096];
    pid_t pid = 0;
    ssize_t size;
    living = held = 0;
    lseek(children, 0, SEEK_SET);
    while ((size = read(children, text, sizeof text)) > 0)
        for (char *at = text; at < text + size; at++)
            if (*at != ' ')
                pid = pid * 10 + *at - '0';
            else {
                kill_child(pid);
                pid = 0;
            }
    if (children >= 0)
        return;
    DIR *all = opendir("/proc"); /* Without CONFIG_PROC_CHILDREN, try every process. */
    for (struct dirent *each; all && (each = readdir(all));)
        if ((pid = atoi(each->d_name)) > 0)
            kill_child(pid);
    if (all)
        closedir(all);
}

/* --- the agent ------------------------------------------------------------------------------------------------------- */

static void hang_up(void)
{
    if (agent >= 0)
        close(agent);
    agent = -1;
}

/* Send the state. If the agent's receive buffer is full, disconnect from the agent if this is an answer. A mere change is
 * sent later, once the agent reads again. Other errors are ignored, because an agent that has disconnected may have sent
 * requests that are still to be read. */
static void send_state(const char *kind, int is_answer)
{
    char text[2048];
    int size = sprintf(text, "%s version=%d keeper=%d program=%d phase=%s reaped=%lu killing=%d childless=%d", kind, VERSION,
        getpid(), slots[0].pid, *failure.step ? "failed" : reports < 0 ? "running" : "starting", reaped, is_killing,
        is_childless);
    if (*failure.step)
        size += sprintf(text + size, " failed=%s:%d", failure.step, failure.error);
    for (int i = 0; i < MAX_SLOTS; i++)
        if (slots[i].at_ms)
            size += sprintf(text + size, " exit=%d:%d:%d:%lld", i, slots[i].pid, slots[i].status, slots[i].at_ms);
    if (send(agent, text, size, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        is_unsent = 0;
    else if (errno == EAGAIN && is_answer)
        hang_up();
}

static void answer(void)
{
    char request[128];
    const char *kind = "ok";
    int slot, pid;
    long long since_ms;
    ssize_t size = recv(agent, request, sizeof request - 1, MSG_DONTWAIT);
    if (size < 0 && errno == ECONNRESET)
        return; /* The agent disconnected without reading all answers, but its last requests are still to be read. */
    if (size <= 0) {
        hang_up();
        return;
    }
    request[size] = '\0';
    if (sscanf(request, "watch %d %d %lld", &slot, &pid, &since_ms) == 3 && slot > 0 && slot < MAX_SLOTS) {
        slots[slot] = (struct ending){.pid = pid};
        for (int i = 0; i < MAX_EXITS; i++)
            if (exits[i].pid == pid && exits[i].at_ms >= since_ms)
                slots[slot] = exits[i];
    } else if (!strcmp(request, "kill"))
        is_killing = 1;
    else if (!strcmp(request, "release"))
        is_released = 1;
    else if (strcmp(request, "state") != 0)
        kind = "error reason=request";
    send_state(kind, 1);
}

/* Accept an agent in place of the previous one, whose requests have all been read. The modes of the socket and its
 * directory determine who may connect. */
static void accept_agent(void)
{
    int caller = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (caller < 0) {
        poll(NULL, 0, MAX_PAUSE_MS); /* No descriptor is free, so do not try again at once. */
        return;
    }
    hang_up();
    agent = caller;
    is_unsent = 1;
}

int main(int argc, char **argv)
{
    sigset_t blocked, heard;
    sigfillset(&blocked);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    signal(SIGCHLD, SIG_DFL); /* If it were ignored, the kernel would reap the children, and their pids could be reused. */
    sigemptyset(&heard);
    sigaddset(&heard, SIGCHLD);
    sigaddset(&heard, SIGTERM);
    setsid();
    int signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
    if (argc != 3 || signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0)
        return errno ? errno : EINVAL;
    for (int i = 1; i < argc; i++)
        if (fcntl(atoi(argv[i]), F_SETFD, FD_CLOEXEC) < 0)
            return errno;
    listener = atoi(argv[1]);
    children = open("/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
    start(atoi(argv[2]));
    close(atoi(argv[2]));
    for (int i = 0; i < 3; i++) /* Only the program uses the standard streams. */
        close(i);

    int pause_ms = 0;
    while (!is_childless || !is_released) {
        short of_agent = is_unsent ? POLLIN | POLLOUT : POLLIN;
        struct pollfd ready[] = {{signals, POLLIN, 0}, {listener, POLLIN, 0}, {reports, POLLIN, 0}, {agent, of_agent, 0}};
        struct signalfd_siginfo got;
        poll(ready, 4, pause_ms);
        pause_ms = pause_ms <= 0 ? 1 : pause_ms < MAX_PAUSE_MS ? 2 * pause_ms : MAX_PAUSE_MS;
        while (read(signals, &got, sizeof got) == sizeof got) {
            pause_ms = 0;
            if (got.ssi_signo == SIGTERM) /* The machine shuts down, so nobody will send "release". */
                is_released = 1;
        }
        if (ready[3].revents & ~POLLOUT)
            answer();
        else if (ready[1].revents)
            accept_agent();
        if (ready[2].revents)
            read_report();
        /* While killing, do not reap dead children as long as any child is alive. Dead children count against process
         * limits, so even the fastest fork bomb runs out of pids. A fork bomb with only few processes is killed soon
         * anyway, because each round of kills is then short. If no child exits for a while, reap nevertheless: a child may
         * be stuck in the kernel, or may exit only after the keeper has reaped one of its threads, whose tracer it is. */
        if (is_killing)
            kill_children();
        if ((!living || held > MAX_HELD || pause_ms == MAX_PAUSE_MS) && reap())
            pause_ms = 0;
        else if (!is_killing || is_childless)
            pause_ms = -1;
        if (is_unsent && agent >= 0)
            send_state("state", 0);
    }
    return 0;
}
