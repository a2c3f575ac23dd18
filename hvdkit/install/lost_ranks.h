// Who is missing when a job breaks: the ranks that are still there say so.
//
// Added by hvdkit (hvdkit/install/losses.py); no part of Horovod's release.
//
// A rank whose connection breaks knows that some rank is gone, not which: it may have lost a
// neighbour that gave up because of a third. So each rank that fails without having asked for the end
// leaves its number at the launcher's rendezvous server, and whoever has an error to raise reads after
// a moment whose number is not there. Without such a server (MPI), and in elastic jobs, where the
// launcher decides who goes on, the error names what was waited for only.

namespace horovod {
namespace common {
namespace lost_ranks {

namespace {

// How long the others may take to notice; connections are closed at once, so they notice soon.
constexpr std::chrono::milliseconds kPatience(2000);
constexpr std::chrono::milliseconds kRequestLimit(3000);
constexpr size_t kNamesShown = 6;

struct Job {
  std::mutex mutex;
  std::string url; // of this job's scope at the server; empty: nobody to ask
  int rank = 0;
  int size = 1;
  bool lost = false;
  bool server_lost = false;
  std::chrono::steady_clock::time_point lost_at;
  std::string cause;
  std::string reason;
};

// Never destroyed: threads may still ask while the process exits.
Job& GetJob() {
  static auto* job = new Job();
  return *job;
}

// A host that is cut off would keep a request for minutes, so another thread makes it.
bool Request(const std::string& url, const std::string& method, const std::string& body,
             std::string& answer) {
  auto answered = std::make_shared<std::promise<http::Response>>();
  auto response = answered->get_future();
  std::thread([=] {
    try {
      http::Request request(url);
      answered->set_value(request.send(method, body));
    } catch (...) {
      answered->set_exception(std::current_exception());
    }
  }).detach();
  if (response.wait_for(kRequestLimit) != std::future_status::ready) {
    return false;
  }
  try {
    auto received = response.get();
    answer.assign(received.body.begin(), received.body.end());
    return received.status == HTTP_OK;
  } catch (const std::exception& ex) {
    LOG(DEBUG) << "No answer from the rendezvous server: " << ex.what();
    return false;
  }
}

std::string ListRanks(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size() && i < 2 * kNamesShown; ++i) {
    out << (i ? ", " : "") << ranks[i];
  }
  if (ranks.size() > 2 * kNamesShown) {
    out << ", ... (" << ranks.size() << " in all)";
  }
  return out.str();
}

// Returns an empty string when nobody is missing, or nobody can be asked.
std::string AskWhoIsMissing(Job& job) {
  const auto deadline = job.lost_at + kPatience;
  std::vector<int> missing;
  for (auto pause = std::chrono::milliseconds(50);; pause *= 2) {
    std::string answer;
    if (!Request(job.url + "*", HTTP_GET_METHOD, "", answer)) {
      job.server_lost = true;
      return "";
    }
    std::set<std::string> there;
    std::istringstream lines(answer);
    for (std::string line; std::getline(lines, line);) {
      there.insert(line);
    }
    if (there.count("stall") && Request(job.url + "stall", HTTP_GET_METHOD, "", answer)) {
      return answer;
    }
    missing.clear();
    for (int rank = 0; rank < job.size; ++rank) {
      if (!there.count(std::to_string(rank))) {
        missing.push_back(rank);
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (missing.empty() || now >= deadline) {
      break;
    }
    std::this_thread::sleep_for(
        std::min<std::chrono::steady_clock::duration>(pause, deadline - now));
  }
  if (missing.empty()) {
    return "";
  }
  return ListRanks(missing) + (missing.size() == 1 ? " does" : " do") +
         " not answer: ended before the others, died, stopped, or cut off from the network; the "
         "first error in the output of " +
         ListRanks(missing) + " says why, if there is one";
}

} // namespace

std::string WithoutPlace(const std::string& text) {
  auto rest = text;
  // Gloo may put two places in front.
  for (auto end = rest.find("] "); rest.compare(0, 2, "[/") == 0 && end != std::string::npos;
       end = rest.find("] ")) {
    rest.erase(0, end + 2);
  }
  return rest;
}

void Begin(const std::string& server, int port, uint64_t id, int rank, int size) {
  auto& job = GetJob();
  std::lock_guard<std::mutex> guard(job.mutex);
  job.url = server.empty() || size == 1 ? ""
                                        : "http://" + server + ":" + std::to_string(port) +
                                              "/lost_ranks_" + std::to_string(id) + "/";
  job.rank = rank;
  job.size = size;
  job.lost = false;
  job.server_lost = false;
  job.cause.clear();
  job.reason.clear();
}

bool Note(const std::string& cause) {
  auto& job = GetJob();
  std::lock_guard<std::mutex> guard(job.mutex);
  if (job.lost) {
    return false;
  }
  job.lost = true;
  job.lost_at = std::chrono::steady_clock::now();
  job.cause = cause;
  std::string answer;
  if (!job.url.empty() &&
      !Request(job.url + std::to_string(job.rank), HTTP_PUT_METHOD, "here", answer)) {
    job.server_lost = true;
    job.url.clear();
  }
  return true;
}

bool Noted() {
  auto& job = GetJob();
  std::lock_guard<std::mutex> guard(job.mutex);
  return job.lost;
}

void ReportStall(const std::string& reason) {
  auto& job = GetJob();
  std::lock_guard<std::mutex> guard(job.mutex);
  job.reason = reason;
  std::string answer;
  if (!job.url.empty()) {
    Request(job.url + "stall", HTTP_PUT_METHOD, reason, answer);
  }
}

std::string Explain(const std::vector<std::string>& names) {
  auto& job = GetJob();
  std::lock_guard<std::mutex> guard(job.mutex);
  if (job.reason.empty() && !job.url.empty()) {
    job.reason = AskWhoIsMissing(job);
  }
  if (job.reason.empty() && job.server_lost) {
    job.reason = "a rank is lost, and the rendezvous server (in horovodrun, or beside rank 0 under "
                 "hvdkit exec) does not answer either: it ended, or is cut off from this host";
  }
  if (job.reason.empty()) {
    job.reason = "a rank ended before the others, died, or its connection broke; the first error in "
                 "the output of the job says why";
  }
  std::ostringstream out;
  out << "Horovod has been shut down: " << job.reason << ".";
  if (!names.empty()) {
    out << " Rank " << job.rank << " was waiting for ";
    for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
      out << (i ? ", " : "") << names[i];
    }
    if (names.size() > kNamesShown) {
      out << ", ... (" << names.size() << " in all)";
    }
    out << ".";
  }
  if (!job.cause.empty()) {
    out << " (" << WithoutPlace(job.cause) << ")";
  }
  return out.str();
}

} // namespace lost_ranks
} // namespace common
} // namespace horovod
