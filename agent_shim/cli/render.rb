# Evaluates the jobs' ERB templates as a Director does. Standard input is [{name, properties, spec, links, absent, templates:
# [{source, target, text}]}]. Standard output is {files: {name: {target: text}}, errors: [{job, source, line, text}]}. Anything that
# a template prints goes to standard error.
require 'digest'
require 'erb'
require 'ipaddr'
require 'json'
require 'openssl'
require 'ostruct'
require 'securerandom'
require 'set'
require 'shellwords'
require 'time'
require 'uri'
require 'yaml'
begin
  require 'base64'
rescue LoadError
  nil # no longer a part of ruby 3.4
end

RESULT = $stdout.dup
$stdout.reopen($stderr)

# Templates may use these ActiveSupport methods, which a Director loads for them.
class Object
  def blank? = respond_to?(:empty?) ? !!empty? : !self
  def present? = !blank?
  def presence = present? ? self : nil
end

class String
  def blank? = strip.empty?
end

class Missing < StandardError; end

module Properties
  NONE = Object.new

  def p(names, default = NONE)
    found = Array(names).map { |name| find(name) }.find { |value| !value.nil? }
    return found unless found.nil?
    raise Missing, missing(Array(names)) if default.equal?(NONE)
    default
  end

  def if_p(*names)
    found = names.map { |name| find(name) }
    return Otherwise.new(self) if found.any?(&:nil?)
    yield(*found)
    Nothing.new
  end

  def missing(names) = "there is no property #{names.join(', ')}"

  def find(name) = name.split('.').inject(@raw_properties) { |at, key| at.is_a?(Hash) ? at[key] : nil }
end

# The result of if_p and if_link if a value is missing. Its methods run the alternative, for example the block of `else`.
Otherwise = Struct.new(:job) do
  def else = yield
  def else_if_p(*names, &block) = job.if_p(*names, &block)
  def else_if_link(name, &block) = job.if_link(name, &block)
end

class Nothing
  def else = nil
  def else_if_p(*) = self
  def else_if_link(*) = self
end

class LinkInstance
  include Properties
  attr_reader :name, :index, :id, :az, :properties, :bootstrap

  def initialize(link, given)
    @link = link
    @name, @index, @id, @az, @address, @bootstrap = given.values_at('name', 'index', 'id', 'az', 'address', 'bootstrap')
    @properties = @raw_properties = given['properties']
  end

  def address
    return @address if @address || @link.manual?
    raise Missing, "the link #{@link.name} has no address of #{@name}/#{@index}: give static_ips in the manifest, or --addresses"
  end

  def missing(names) = @link.missing(names)
end

class Link
  include Properties
  attr_reader :instances, :properties, :name

  def initialize(name, given)
    @name, @given = name, given
    @properties = @raw_properties = given['properties']
    @instances = given['instances'].map { |one| LinkInstance.new(self, one) }
  end

  def manual? = @given['is_manual']

  def missing(names)
    why = "#{@given['provider']} does not set it, or its spec does not provide it"
    why = 'add it to its `properties` in `consumes`' if manual?
    "the link #{@name} has no property #{names.join(', ')}: #{why}"
  end

  # Return the instance's own address if the criteria select a single instance, or `whole` if they select all instances. The
  # address of any other selection would need bosh-dns.
  def address(criteria = {})
    return @given['address'] if manual?
    zones = criteria[:azs] || criteria['azs']
    meant = zones ? @instances.select { |one| zones.include?(one.az) } : @instances
    return meant.first.address if meant.size == 1
    return @given['whole'] if @given['whole'] && meant.size == @instances.size
    raise Missing, "the link #{@name} needs one address for #{meant.size} instances, which only bosh-dns has: " \
                   "use --group-address, or `address` in `consumes`"
  end
end

class Job
  include Properties
  attr_reader :name, :index, :spec, :properties, :raw_properties

  def initialize(given)
    @raw_properties, @links, @absent = given['properties'], given['links'], given['absent']
    @job = given['name']
    @properties, @spec = deep(@raw_properties), deep(given['spec'])
    @name, @index = @spec.name, @spec.index
  end

  def link(name)
    return Link.new(name, @links[name]) if @links.key?(name)
    raise Missing, "there is no link #{name}: #{@absent.fetch(name) { "the spec of #{@job} consumes none of this name" }}"
  end

  def if_link(name)
    return Otherwise.new(self) unless @links.key?(name)
    yield link(name)
    Nothing.new
  end

  def render(place, text)
    template = ERB.new(text, trim_mode: '-')
    template.filename = place
    template.result(binding)
  end
end

def deep(value)
  case value
  when Hash then OpenStruct.new(value.transform_values { |member| deep(member) })
  when Array then value.map { |member| deep(member) }
  else value
  end
end

# Return the line in the template and the error message. If ruby says only that something is nil, name the missing value.
def mistake(error, place, text)
  line = (error.backtrace || []).grep(/\A#{Regexp.escape(place)}:/).first.to_s[/:(\d+)/, 1]
  line ||= error.message[/#{Regexp.escape(place)}:(\d+)/, 1]
  said = error.message.lines.map(&:strip).reject(&:empty?).first.to_s.sub(/\A#{Regexp.escape(place)}:\d+: /, '')
  if error.is_a?(NoMethodError) && error.receiver.nil? && line
    said = "a value is missing (nil), so it has no `#{error.name}`, in: #{text.lines[line.to_i - 1].to_s.strip}"
  end
  said = "the template ends the program: #{said}" if error.is_a?(SystemExit)
  { line: line.to_i, text: said }
rescue ArgumentError # raised by `receiver`
  { line: line.to_i, text: said }
end

files, errors = {}, []
JSON.parse($stdin.read).each do |given|
  rendered = files[given['name']] = {}
  given['templates'].each do |template|
    place = "#{given['name']}/#{template['source']}"
    rendered[template['target']] = Job.new(given).render(place, template['text'])
  rescue Exception => e # like the Director, rescue any exception, because a template may call abort
    errors << { job: given['name'], source: template['source'], **mistake(e, place, template['text']) }
  end
end
RESULT.puts JSON.generate(files: files, errors: errors)
